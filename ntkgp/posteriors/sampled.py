"""Samples of the exact posterior for models too large to factorise, from linear systems alone."""

import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor

from ntkgp.evidence import Estimate, log_det_estimate
from ntkgp.likelihoods import Gaussian, SiteBlocks
from ntkgp.linearization import Features
from ntkgp.linearization.inputs import Input
from ntkgp.posteriors.data import draw
from ntkgp.posteriors.descent import KRONECKER_POINTS, kronecker_preconditioner
from ntkgp.posteriors.function_space import FunctionSpacePosterior
from ntkgp.posteriors.model import Chunk, split
from ntkgp.posteriors.sketch import Sketch
from ntkgp.posteriors.weight_space import WeightSpacePosterior
from ntkgp.solvers import Product, Rows, Solution, dual_descent, gradient_descent

__all__ = ["SampledPosterior"]

SOLVERS = ("cg", "descent", "dual")
_SUBSET_ROWS = 6000  # rows of B of the subset that preconditions: factorised in a second
_SKETCH = 500  # vectors of the sketch that preconditions where a single point has more rows
_REMEMBERED = 2  # solutions that the next ones start from
_BLOCK, _BLOCK_NUMBERS = 256, 1 << 18  # points whose noise comes from one seed, and at most so many outputs of theirs


class SampledPosterior(WeightSpacePosterior):
    r"""q(θ) by S samples ζ_j of the exact Σ = (Jᵀ Λ J + S₀⁻¹)⁻¹, and covariances by averages over them.

    Sample-then-optimise (Antorán et al. 2023): with θ₀ ~ N(0, S₀) and ε ~ N(0, I) the solution of

    .. math:: (J^\top \Lambda J + S_0^{-1})\, \zeta = S_0^{-1} \theta_0 + J^\top R\, \varepsilon

    has covariance Σ, and equals Matheron's θ₀ − S₀ Jᵀ R B⁻¹(Rᵀ J θ₀ − ε). Solved by conjugate gradients, one pass over
    the data an iteration for all samples together, preconditioned by the exact posterior of a weighted subset, or where
    one point has too many outputs for that, as an image, by a random sketch of Jᵀ Λ J. The noise stays when
    hyperparameters change, and solutions are where the next ones start. Under ``torchrun`` processes share the data.

    Args:
        state: as for :class:`Posterior`.
        num_samples: S.
        seed: of the noise.
        tolerance: of the linear systems, relative, in the norm that the preconditioner defines.
        max_iterations: passes over the data for the samples, at most.
        preconditioner: how many points precondition the linear systems; by default what is factorised in a second; 0
            for S₀ alone.
        sketch: the rank of a sketch that preconditions instead, at the price of so many products with Jᵀ Λ J; 0 for
            none, by default 500 if a single point has more outputs than could be factorised, or features too large.
        solver: "cg" for conjugate gradients, an iteration a pass; or ``max_iterations`` passes by minibatches, for one
            process: "descent" down the gradient, with a Kronecker-factored preconditioner, or "dual" over a number for
            each output, Matheron's rule as it stands.
        batch_size: points in a minibatch; a loader has its own.
    """

    method = "sampled"
    _newton_tolerance = 0.1

    def __init__(
        self,
        *state: Any,
        num_samples: int = 16,
        seed: int = 0,
        tolerance: float = 1e-2,
        max_iterations: int = 100,
        preconditioner: int | None = None,
        sketch: int | None = None,
        solver: str = "cg",
        batch_size: int = 256,
    ) -> None:
        super().__init__(*state)
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, but is {num_samples}")
        if not 0 < tolerance < 1:
            raise ValueError(f"tolerance must be between 0 and 1, but is {tolerance}")
        self.num_samples, self.seed, self.tolerance, self.max_iterations = num_samples, seed, tolerance, max_iterations
        if solver not in SOLVERS:
            raise ValueError(f"solver must be one of {', '.join(SOLVERS)}, but is {solver!r}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, but is {batch_size}")
        for name, value in (("sketch", sketch), ("preconditioner", preconditioner)):
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative, but is {value}")
        self.preconditioner, self.sketch, self.solver, self.batch_size = preconditioner, sketch, solver, batch_size
        self.model = self.model.shared()
        if solver != "cg" and self.model.ranks.world > 1:
            raise ValueError(f'solver="{solver}" runs in one process, but there are {self.model.ranks.world}: use "cg"')
        self.solution: Solution | None = None  # of the last samples: residuals and counts
        self._last: Tensor | None = None  # where the next solve starts, (k, S + 1, P): the last solutions, newest first
        self._step: Tensor | None = None  # from the mean to the mode, to first order
        self._f: Tensor | None = None  # (N, C), where Λ is evaluated at our points
        self._pulled_noise: tuple[list[Tensor], Tensor] | None = None  # with the likelihood's hyperparameters then
        self._coarse: list[FunctionSpacePosterior] = []  # in a list, as it is no part of this module
        self._sketched: tuple[list[Tensor], Sketch] | None = None  # with what Λ depended on then

    @property
    def _options(self) -> dict[str, Any]:
        names = "num_samples", "seed", "tolerance", "max_iterations", "preconditioner", "sketch", "solver", "batch_size"
        return {name: getattr(self, name) for name in names}

    @property
    def _mode_tolerance(self) -> float:  # type: ignore[override]
        return self.tolerance

    @property
    def _max_cg(self) -> int:  # type: ignore[override]
        return self.max_iterations

    def _at(self, *args: Any, **kwargs: Any) -> Self:
        moved = super()._at(*args, **kwargs)
        moved._last, moved._sketched = self._last, self._sketched
        return moved

    def _forget(self) -> None:
        super()._forget()
        self._last, self._step, self._f, self._pulled_noise, self._coarse = None, None, None, None, []
        self._sketched = None

    # Samples

    def _prepare(self) -> None:
        self._statistics()

    def _statistics(self) -> Tensor:  # ζ, (S, P)
        def make() -> Tensor:
            found, self._kept = self._kept, None
            if found is not None and all(map(torch.equal, self._kept_under, self._all_hyperparameters())):
                return found
            with torch.no_grad():
                return self._collect()

        return self._current("samples", make)

    def _all_hyperparameters(self) -> list[Tensor]:
        return [t.detach().clone() for t in (*self.parameters(), *self.buffers())]

    def _keep(self, statistics: Tensor) -> None:
        """Take over samples that belong to the hyperparameters as they are, those of the prior among them."""
        self._kept, self._kept_under = statistics, self._all_hyperparameters()

    def _collect(self) -> Tensor:  # (S, P)
        """Solve for the samples and, with no further pass over the data, for the Newton step from the mean to θ_⋆."""
        pulled = self._pulled()
        delta = torch.zeros_like(self.lin.theta) if self.shift is None else self.shift
        g = pulled[-1:] - self.prior.precision_times(self.lin.theta + delta - self.prior.mean)
        b = torch.cat([self.prior.precision_times(self._prior_draws()) + pulled[:-1], g])
        self.solution = self._solve(b, self._roots_now(), self.tolerance, self._last)
        if self.solution.residual > self.tolerance:
            warnings.warn(
                f"the samples have residuals of up to {self.solution.residual:.2g} after {self.solution.iterations} "
                f"iterations, not {self.tolerance:g}: raise max_iterations or preconditioner",
                stacklevel=3,
            )
        found = self.solution.x
        self._last = torch.stack([found, *(() if self._last is None else self._last[: _REMEMBERED - 1])])
        self._step = found[-1]
        return found[:-1]

    def _prior_draws(self) -> Tensor:  # θ₀, (S, P)
        return self.prior.spread(_noise(self.seed, 0, (self.num_samples, self.lin.num_params)).to(self.lin.theta))

    def _pulled(self) -> Tensor:  # Jᵀ R ε and Jᵀ r, (S + 1, P)
        """Pull the noise and the residuals of the data back to the weights: the same ε whatever the hyperparameters."""
        now = [p.detach().clone() for p in self.likelihood.parameters()]
        if self._pulled_noise is None or not all(map(torch.equal, now, self._pulled_noise[0])):
            f = self._f_here()
            total = torch.zeros(self.num_samples + 1, self.lin.num_params).to(self.lin.theta)
            for chunk in self.model:
                E = self._expand(chunk, f[chunk.points])
                R = E.R if self.sites is None else self._site_root(chunk)
                noise = R.apply(self._noise_of(chunk, R.values.shape[-3] * R.values.shape[-1]))
                total += chunk.pull(torch.cat([noise, E.r.unsqueeze(0)]))
            self._pulled_noise = now, self.model.summed(total)
        return self._pulled_noise[1]

    def _noise_of(self, chunk: Chunk, width: int) -> Tensor:  # ε, (S, n, C')
        """Return the noise of these points, which does not depend on how the data are cut."""
        n, start = len(chunk.data), chunk.first
        size = max(1, min(_BLOCK, _BLOCK_NUMBERS // width))  # a point may have as many outputs as an image has pixels
        blocks = range(start // size, (start + n - 1) // size + 1)
        drawn = torch.cat([_noise(self.seed, 1 + block, (size, self.num_samples, width)) for block in blocks])
        offset = start % size
        return drawn[offset : offset + n].transpose(0, 1).to(self.lin.theta)

    def _roots_now(self) -> Callable[[Chunk], SiteBlocks]:
        """Return chunk -> R; where Λ is evaluated is found once, not in every pass."""
        if self.sites is not None:
            return self._site_root
        f = self._f_here()
        return lambda chunk: self._expand(chunk, f[chunk.points]).R

    def _f_here(self) -> Tensor:  # (N, C)
        """Return f + J δ at our training points, found once."""
        if self._f is None:
            with torch.no_grad():
                self._f = torch.cat([self._moved(chunk, self.shift) for chunk in self.model])
        return self._f

    def _f_train(self) -> Tensor:  # (N, C)
        return self._f_here() if self.shift is None else super()._f_train()

    def _first_step(self, start: Tensor) -> Tensor | None:  # (P,)
        if start.any() or self.shift is not None:
            return None
        self._statistics()
        return self._step

    def _centred_weights(self, n: int, generator: torch.Generator | None) -> Tensor:  # (n, P)
        if n > self.num_samples:
            raise ValueError(f"there are {self.num_samples} samples, but {n} are wanted: fit with num_samples={n}")
        zeta = self._statistics()
        return zeta[torch.randperm(self.num_samples, generator=generator, device=zeta.device)[:n]]

    # Solvers

    def _solve(self, b: Tensor, root: Callable[[Chunk], SiteBlocks], *args: Any, **kwargs: Any) -> Solution:  # (S, P)
        return super()._solve(b, root, *args, **kwargs) if self.solver == "cg" else self._descend(b, root, *args)

    def _descend(
        self, b: Tensor, root: Callable[[Chunk], SiteBlocks], tolerance: float, start: Tensor | None = None
    ) -> Solution:  # (S, P)
        """Solve by minibatches; the tolerance is what the certificate is compared with, not what is aimed at."""
        model, prior, N = self.model, self.prior, len(self._f_here())
        start = None if start is None else start[0]

        def batches(epoch: int) -> Iterator[Rows]:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            for chunk in model.shuffled_chunks(self.batch_size, generator):
                yield _rows(chunk, root(chunk), N)

        if self.solver == "dual":
            R = root(next(iter(model))).values
            shape = N, R.shape[-3] * R.shape[-1]
            return dual_descent(
                batches, prior.covariance_times, prior.precision_times, b, shape, self.max_iterations, start, self.seed
            )
        points = draw(model.source, self.lin, self.likelihood, KRONECKER_POINTS, self.seed)
        precondition = kronecker_preconditioner(model, prior, self.likelihood, self.shift, *points)
        return gradient_descent(batches, prior.precision_times, b, precondition, self.max_iterations, start, self.seed)

    # The preconditioner

    def _precondition(self, v: Tensor) -> Tensor:  # (S, P)
        return self._preconditioner_at(None)(v)

    def _preconditioner_at(self, delta: Tensor | None) -> Product:  # (P,)
        """Return the covariance of the subset's posterior with Λ at θ* + δ: a sure network has none at θ*."""
        if self._rank:
            return self._sketch_preconditioner()
        if self.preconditioner == 0:
            return self.prior.covariance_times
        return (self._subset() if delta is None else self._subset()._at(delta))._covariance_times

    @property
    def _rank(self) -> int:
        if self.sketch is not None or self.preconditioner == 0:
            return self.sketch or 0
        large = self.lin.num_outputs > _SUBSET_ROWS or self.lin.capture_bytes > self.model.memory_budget
        return min(_SKETCH, self.lin.num_params) if large else 0

    def _sketch_preconditioner(self) -> Product:
        with torch.no_grad():
            return self._current("sketch", lambda: self._sketch().preconditioner(self.prior))

    def _sketch(self) -> Sketch:
        """Return the sketch; where Λ = I / σ² it is rescaled when the noise changes, elsewhere another one is made."""
        likelihood = self.likelihood
        scalar = isinstance(likelihood, Gaussian) and likelihood.noise.numel() == 1
        now = [likelihood.noise.detach().sqrt()] if scalar else [p.detach().clone() for p in likelihood.parameters()]
        if self._sketched is None or not (scalar or all(map(torch.equal, now, self._sketched[0]))):
            self._sketched = now, self._new_sketch()
        then, sketch = self._sketched
        return sketch.scaled(then[0] / now[0]) if scalar else sketch

    def _new_sketch(self) -> Sketch:
        root, generator = self._roots_now(), torch.Generator(self.lin.device).manual_seed(self.seed)
        together = self.num_samples + 1
        return Sketch.of(lambda v: self._ggn_times(v, root), self.prior, self._rank, together, generator)

    def _subset(self) -> FunctionSpacePosterior:
        if not self._coarse:
            self._coarse = [self._subset_posterior()]
        return self._coarse[0]

    def _subset_posterior(self) -> FunctionSpacePosterior:
        """Return the exact posterior of M points that stand for all: the same on every rank."""
        M = self.preconditioner or max(1, _SUBSET_ROWS // self.lin.num_outputs)
        chosen, N = draw(self.model.source, self.lin, self.likelihood, M, self.seed)
        all_of_them = chosen.standing_for(torch.full((len(chosen),), N / len(chosen)).to(self.lin.theta))
        model = self.model.with_source(all_of_them)
        return FunctionSpacePosterior(model, self.prior, self.likelihood, self.shift)

    # q(f)

    def _moves(self, F: Features) -> Tensor:  # J ζ, (n, C, S)
        return F.jvp(split(self.lin, self._statistics())).movedim(0, -1)

    def _blocks(self, F: Features) -> Tensor:  # (n, C, C)
        V = self._moves(F)
        return V @ V.mT / self.num_samples

    def _joint(self, F: Features) -> Tensor:  # (n C, n C)
        V = self._moves(F).flatten(0, 1)
        return V @ V.mT / self.num_samples

    def covariance_error(self, x: Input) -> Tensor:  # (N, C, C)
        """Return the standard errors of the covariances of ``latent(x)``: √((Σ_ii Σ_jj + Σ_ij²) / S)."""
        Sigma = self.latent(x).covariance_matrix
        variance = Sigma.diagonal(dim1=-2, dim2=-1)
        return ((variance.unsqueeze(-1) * variance.unsqueeze(-2) + Sigma.square()) / self.num_samples).sqrt()

    def _covariance_times(self, v: Tensor) -> Tensor:  # (S, P)
        return self._solve(v, self._roots_now(), self.tolerance).x

    # Evidence

    def effective_parameters(self) -> Tensor:  # (G,)
        """Return γ by group, an estimate; see :meth:`effective_parameters_by_sample` for its error."""
        return self.effective_parameters_by_sample().mean(0)

    def effective_parameters_by_sample(self) -> Tensor:  # (S, G)
        r"""Return S independent estimates of γ: aᵀ (∂S₀/∂log s_g) a with a = S₀⁻¹(θ₀ − ζ).

        θ₀ − ζ has covariance S₀ − Σ, so these have the mean P_g − α_g tr Σ_gg; unlike ‖ζ_g‖² they do not vary where
        data say nothing. They are the solves u = B⁻¹w of the pathwise estimator of the evidence's gradient: a = Jᵀ R u.
        """
        with torch.no_grad():
            index, changed = self.prior.precision_index, self._changed()
            shares = changed * self.prior.precision_times(changed)  # S₀ a ∘ a
            return shares.new_zeros(len(shares), int(index.max()) + 1).index_add_(1, index, shares)

    def _changed(self) -> Tensor:  # θ₀ − ζ, (S, P)
        """Return what the data changed of the prior's draws."""
        with torch.no_grad():
            return self._prior_draws() - self._statistics()

    def _log_det(self) -> Tensor:  # ()
        """Estimate log |B| by Lanczos quadrature, its gradient by the samples."""
        estimate = self.log_det()
        with torch.no_grad():
            a = self.prior.precision_times(self._changed())
        surrogate = (a * self.prior.covariance_times(a)).sum() / len(a)  # its gradient, at fixed a, is that of log |B|
        total = estimate.value + surrogate - surrogate.detach()
        learnt = [p for p in self.likelihood.parameters() if p.requires_grad]
        if learnt and torch.is_grad_enabled():
            noise = getattr(self.likelihood, "noise", None)
            if noise is None or noise.numel() > 1 or len(learnt) > 1:
                raise ValueError(
                    'method="sampled" estimates gradients in the prior\'s hyperparameters and one Gaussian noise: fix '
                    "those of the likelihood with requires_grad_(False)"
                )
            log_noise = noise.log().sum()
            total = total - surrogate.detach() * (log_noise - log_noise.detach())  # ∂ log |B| / ∂ log σ² = −γ
        return total

    def log_det(self, num_probes: int | None = None, steps: int = 40) -> Estimate:
        """Estimate log |B|, with its standard error.

        Args:
            num_probes: random vectors, as many as samples by default.
            steps: passes over the data.
        """

        def make() -> Estimate:
            root = self._roots_now()

            def whitened(z: Tensor) -> Tensor:  # S₀^½ᵀ (Jᵀ Λ J + S₀⁻¹) S₀^½ z
                return z + self.prior.whiten(self._ggn_times(self.prior.spread(z), root))

            probes = _noise(self.seed, -1, (num_probes or self.num_samples, self.lin.num_params)).to(self.lin.theta)
            with torch.no_grad():
                return log_det_estimate(whitened, probes, steps)

        return self._current(f"log det {num_probes} {steps}", make)

    def refine(self, method: str = "laplace", curvature_at: str = "linear_mode", **options: Any) -> Self:
        """Return a new posterior whose mean is the mode of the linear model.

        Args:
            method: "laplace"; see :meth:`Posterior.refine`.
            curvature_at: "linear_mode" for Λ at the mode, and new samples; "map" for Λ where this posterior has it, and
                its samples, which costs nothing.
            options: as for :meth:`Posterior.refine`.
        """
        if curvature_at not in ("linear_mode", "map"):
            raise ValueError(f'curvature_at must be "linear_mode" or "map", but is {curvature_at!r}')
        if method != "laplace" or curvature_at == "linear_mode":
            return super().refine(method, **options)
        mode, root = self.search(**options) if options else self.linear_mode(), self._roots_now()
        with torch.no_grad():
            sites = SiteBlocks(torch.cat([root(chunk).values for chunk in self.model]))
        refined = self._at(mode.delta, deepcopy(self.prior), deepcopy(self.likelihood), sites)
        refined.certificate = mode.certificate
        refined._keep(self._statistics())
        return refined

    def _tune_by_evidence(self, **options: Any) -> None:
        """Maximise the evidence by sample-based EM, see :func:`maximise_expectation`."""
        from ntkgp.posteriors.em import maximise_expectation

        maximise_expectation(self, **options)


def _rows(chunk: Chunk, R: SiteBlocks, N: int) -> Rows:
    """Return the rows Rᵀ J of the points of a chunk."""
    return Rows(
        chunk.points,
        len(chunk.data) / N,
        lambda x: R.mT.apply(chunk.push(x)),
        lambda u: chunk.pull(R.apply(u)),
    )


def _noise(seed: int, stream: int, shape: tuple[int, ...]) -> Tensor:
    """Draw standard normal numbers in double precision, the same on every machine of one kind; streams differ."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + stream) % (1 << 63))
    return torch.randn(shape, generator=generator, dtype=torch.float64)
