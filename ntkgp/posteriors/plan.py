r"""What each method would cost, before it runs: seconds and bytes, counted and calibrated on this machine.

With N points, C outputs, C' columns in R (Λ = R Rᵀ), P weights, n = N C', a atoms of Λ (1, or one for each noise that
is learnt), s bytes a number, c seconds for the factored Jacobian of all points, p(k) for k pairs of J v and Jᵀu there,
φ(m) for m operations of matrix products and χ(m) for m of factorisations:

============  ==========================================  =====================  ====================================
method        passes over the data                        algebra                bytes that are kept
============  ==========================================  =====================  ====================================
function      c + φ(Gram matrix)                          χ(n³/3)                s n² + features of J and Rᵀ J
full          c + φ(2 a n P²)                             χ(P³/3)                s (a + 1) P² + features
kron          a pass, timed on a few points               χ(10 Σ (d³_in+d³_out)) s Σ (d²_in + a d²_out)
diag          a pass, timed on a few points               -                      s a P + features
low_rank      c + 3 a k (p(1) + 2 bases): Lanczos         χ(k³/3)                s (a k P + k²) + features
last_layer    as full, with the P of the last layer
variational   c + φ(Gram with M values) + epochs, timed   χ(M³/3)                s N C (M + C + 2) + 24 M² (float64)
sampled       c + 20 p(S + 1): CG iterations              χ of 2000 rows         s (2 S + 1) P + features
============  ==========================================  =====================  ====================================

c, p and the passes are timed on a few points and on more, and prolonged by what a point more takes.
Features count where they are kept: if those of all points fit the budget; otherwise a pass computes them again. The
Gram matrix is counted layer by layer in :mod:`ntkgp.operators.plan`. How many iterations Lanczos, conjugate gradients
and stochastic training take depends on the spectrum: theirs are typical numbers, not bounds. Nor is tuning counted:
it repeats the algebra, some times at each of its steps, and for "kron", "diag", "low_rank" and "sampled" passes, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ntkgp.likelihoods import Likelihood
from ntkgp.likelihoods.expectations import expected
from ntkgp.linearization import Features
from ntkgp.operators.plan import machine_rates, make_plan, shortest
from ntkgp.posteriors.costs import FitPlan, MethodCost
from ntkgp.posteriors.data import Data, as_source, gather
from ntkgp.posteriors.diagonal import DiagonalPosterior
from ntkgp.posteriors.fit import as_likelihood, as_prior, choose, last_layer, linearization
from ntkgp.posteriors.kronecker import KroneckerPosterior
from ntkgp.posteriors.model import Chunk, LinearModel
from ntkgp.posteriors.weight_space import WeightSpacePosterior
from ntkgp.priors import Isotropic, LinearPrior, Prior

__all__ = ["plan"]

_FEW, _GROWN, _LONG = 4, 8, 0.02  # points that are timed at first, then so many times more, until it takes that long
_LANCZOS, _CG, _CG_ROWS = 3, 20, 2000  # products an eigenpair; iterations and subset rows of sampling: see the table
_EPOCHS, _DRAWS = 10, 32  # of stochastic training, by default
_EIGEN = 10  # d³ operations of a symmetric eigendecomposition, about


def plan(
    net: Any,
    data: Any,
    likelihood: str | Likelihood = "categorical",
    prior: str | Prior = "isotropic",
    *,
    rank: int = 100,
    num_inducing: int = 100,
    num_samples: int = 16,
    memory_budget: int = 4 << 30,
) -> FitPlan:
    """Estimate what :func:`ntkgp.fit` would take with each method, from a few points and the sizes of all.

    Args:
        net: the network, or its linearisation.
        data: (X, y) or a Dataset.
        likelihood: name or object.
        prior: name or object; a prior with groups keeps a Gram matrix for each while it is tuned.
        rank: of "low_rank".
        num_inducing: of "variational".
        num_samples: of "sampled".
        memory_budget: bytes that features and matrices may take.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if names are not known, or data, network and likelihood do not fit together.
    """
    lin, likelihood = linearization(net, data, None), as_likelihood(likelihood)
    likelihood.to(device=lin.device, dtype=lin.dtype)
    source = gather(as_source(data, lin, likelihood), lin, likelihood)
    model = LinearModel(lin, source, likelihood, memory_budget)
    groups = 1 if prior == "g_prior" else _atoms(as_prior(prior, lin))
    here = _Problem.of(model, likelihood)
    costs = [_function(here, groups), _full("full", "all weights", here)]
    costs += [_timed(KroneckerPosterior, "layers", here), _timed(DiagonalPosterior, "single weights", here)]
    costs.append(_low_rank(here, min(rank, lin.num_params - 1)))
    last = LinearModel(last_layer(lin), source, likelihood, memory_budget)
    costs.append(_full("last_layer", "its weights alone", _Problem.of(last, likelihood)))
    costs += [_variational(here, num_inducing, groups), _sampled(here, num_samples)]
    choice = choose(model, None)
    return FitPlan(
        len(source), lin.num_outputs, lin.num_params, memory_budget, tuple(costs), choice.method, choice.reason
    )


@dataclass(frozen=True)
class _Problem:
    """The sizes that costs are made of, and what was measured."""

    model: LinearModel
    likelihood: Likelihood
    N: int
    C: int
    columns: int  # C', of R
    P: int
    atoms: int  # of Λ
    size: int  # bytes a number
    features: float  # bytes, of J at all points
    weighted: float  # bytes, of Rᵀ J at all points
    capture: float  # seconds, for J at all points

    @staticmethod
    def of(model: LinearModel, likelihood: Likelihood) -> "_Problem":
        lin, data = model.lin, model.data
        two = data[torch.arange(2, device=data.y.device) % len(data)]
        with torch.no_grad():
            E = likelihood.expand(two.y, lin(two.x))
            weighted = lin.pilot().weighted(E.R.mT.columns)
            capture = _over_all(data, lambda some: lin.features(some.x))
        atoms = likelihood.curvature_atoms(lin.num_outputs)
        kept = float(model.kept)
        return _Problem(
            model, likelihood, len(data), lin.num_outputs, E.R.values.shape[-3] * E.R.values.shape[-1], lin.num_params,
            1 if atoms is None else len(atoms), lin.dtype.itemsize, kept * _grown(lin.pilot(), len(data)),
            kept * _grown(weighted, len(data)), capture,
        )  # fmt: skip

    def products(self, k: int) -> float:
        """Return the seconds that J v and Jᵀu take for k vectors at all points, as a pass of this model would."""
        lin, kept = self.model.lin, self.model.kept
        v = torch.randn(k, lin.num_params, generator=torch.Generator().manual_seed(0)).to(lin.theta)
        chunks: dict[int, Chunk] = {}

        def work(some: Data) -> None:
            new = Chunk(some, lin, slice(0, len(some)), 0, kept)
            chunk = chunks.setdefault(len(some), new) if kept else new  # J is captured once, which is counted by itself
            chunk.pull(chunk.push(v))

        with torch.no_grad():
            return _over_all(self.model.data, work)

    def average(self) -> float:
        """Return the seconds that E[log p], E[r] and E[Λ] of all points take under a Gaussian q(f)."""
        lin = self.model.lin
        unit = torch.eye(self.C, dtype=lin.dtype, device=lin.device)

        def work(some: Data) -> None:
            expected(self.likelihood, some.y, lin(some.x), unit.expand(len(some), -1, -1), some.weights, _DRAWS)

        with torch.no_grad():
            return _over_all(self.model.data, work)

    def multiply(self, operations: float) -> float:
        """Return the seconds of matrix products."""
        return operations / machine_rates(self.model.lin.dtype, self.model.lin.device).flops

    def factorise(self, operations: float, dtype: torch.dtype | None = None) -> float:
        """Return the seconds of factorisations."""
        return operations / _factor_rate(dtype or self.model.lin.dtype, self.model.lin.device)


def _function(here: _Problem, groups: int) -> MethodCost:
    n = here.N * here.columns
    counted = make_plan(here.model.lin, here.N, None, "layerwise", here.model.memory_budget)
    products = sum(cost.flops for cost in counted.costs[1:])  # the first captures features, which is timed instead
    matrix = here.size * (here.N * here.C) ** 2
    kept = here.size * n * n + here.features + here.weighted
    passes = here.capture + here.multiply(products)
    return MethodCost(
        "function", "the exact process", passes, here.factorise(n**3 / 3), kept, kept + (groups + 3) * matrix
    )


def _full(method: str, gives: str, here: _Problem) -> MethodCost:
    matrix, n = here.size * here.P**2, here.N * here.columns
    passes = here.capture + here.multiply(2 * here.atoms * n * here.P**2)
    kept = (here.atoms + 1) * matrix + here.features
    return MethodCost(method, gives, passes, here.factorise(here.P**3 / 3), kept, kept + 4 * matrix)


def _timed(kind: type[WeightSpacePosterior], gives: str, here: _Problem) -> MethodCost:
    """Run the pass of a block-wise method on a few points: their statistics have the size of all points'."""
    model = here.model
    prior = Isotropic(model.lin)
    collect = lambda some: kind(model.with_source(some), prior, here.likelihood)._collected()  # noqa: E731
    found, passes = collect(model.data[:2]), _over_all(model.data, collect)
    tensors = (
        [found] if isinstance(found, torch.Tensor) else [t for b in found.values() for t in (b.G, b.A) if t is not None]
    )
    kept = float(sum(t.nbytes for t in tensors))
    sides = [] if isinstance(found, torch.Tensor) else [t.shape[-1] for t in tensors]
    algebra = here.factorise(_EIGEN * sum(d**3 for d in sides))
    features = here.features if kind is DiagonalPosterior else 0.0  # Kronecker factors do without
    return MethodCost(kind.method, gives, passes, algebra, kept + features, 3 * kept + here.features)


def _low_rank(here: _Problem, k: int) -> MethodCost:
    columns = here.atoms * k
    kept = here.size * (columns * here.P + columns**2) + here.features
    basis = 8 * (2 * k + 1) * here.P  # Lanczos vectors, in double precision; each new one meets the others twice
    each = here.products(1) + 2 * basis / machine_rates(here.model.lin.dtype, here.model.lin.device).bytes
    passes = here.capture + _LANCZOS * columns * each
    return MethodCost("low_rank", f"{k} directions", passes, here.factorise(columns**3 / 3), kept, kept + basis, False)


def _variational(here: _Problem, M: int, groups: int) -> MethodCost:
    lin, rows = here.model.lin, here.N * here.C
    depth = lin.pilot().nbytes / (2 * here.C * here.size)  # numbers in a row of the factored Jacobian
    exact = here.likelihood.curvature_atoms(here.C) is not None
    statistics = here.multiply(4 * rows * M * M + 4 * rows * here.C * M) * 2  # in double precision: twice as long
    passes = here.capture + here.multiply(2 * groups * rows * M * depth) + statistics
    passes += 0.0 if exact else _EPOCHS * (statistics + here.average())
    table = here.size * here.N * here.C * (groups * (M + here.C) + 2)
    kept = table + 8 * 3 * M * M
    algebra = here.factorise(M**3 / 3, torch.float64)
    return MethodCost("variational", f"{M} inducing values", passes, algebra, kept, kept + 8 * 4 * M * M, exact)


def _sampled(here: _Problem, S: int) -> MethodCost:
    n = min(here.N * here.columns, _CG_ROWS)
    capture = here.capture if here.features else 0.0
    passes = capture + _CG * here.products(S + 1)
    vectors = here.size * here.P
    kept = (2 * S + 1) * vectors + here.features + here.size * n * n
    gives = f"{S} samples"
    return MethodCost("sampled", gives, passes, here.factorise(n**3 / 3), kept, kept + 6 * (S + 1) * vectors, False)


def _over_all(data: Data, work: Callable[[Data], object]) -> float:
    """Return the seconds that work on all points would take, from some of them.

    A call takes its time however few its points are, so that two sizes are timed, and more until they take long enough.
    """
    few, n = 0.0, _FEW
    while True:
        n = min(n, len(data))
        part = data[:n]
        seconds = shortest(lambda part=part: work(part))  # type: ignore[misc]
        if n == len(data):
            return seconds
        if few and seconds > _LONG:
            return seconds + max(seconds - few, 0.0) / (n - n // _GROWN) * (len(data) - n)
        few, n = seconds, _GROWN * n


def _grown(two: Features, N: int) -> int:
    """Return the bytes of the features of N points, from those of two: some tensors are there once for all."""
    each = two.nbytes - two[:1].nbytes
    return two[:1].nbytes + (N - 1) * each


def _atoms(prior: Prior) -> int:
    return len(prior.atoms) if isinstance(prior, LinearPrior) else 1


@cache
def _factor_rate(dtype: torch.dtype, device: torch.device, side: int = 768) -> float:
    """Time a Cholesky factorisation; operations a second."""
    B = torch.eye(side, dtype=dtype, device=device).mul_(2)
    return side**3 / 3 / shortest(lambda: torch.linalg.cholesky(B).sum().item())
