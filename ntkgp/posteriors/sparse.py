"""Sparse variational Gaussian processes with the tangent kernel: all data, through M inducing values."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from ntkgp.evidence import Estimate
from ntkgp.likelihoods import Gaussian, Likelihood
from ntkgp.linearization import Features
from ntkgp.linearization.inputs import Input
from ntkgp.operators import gram, point_blocks
from ntkgp.posteriors.base import Posterior
from ntkgp.posteriors.bound import Averages, View, collapsed_bound, surrogate
from ntkgp.posteriors.inducing import Inducing, choose, count
from ntkgp.posteriors.mode import Mode
from ntkgp.posteriors.model import join, split
from ntkgp.posteriors.prediction import Latent, valid_covariance
from ntkgp.posteriors.process import Points, SparseProcess
from ntkgp.posteriors.sparse_training import Plan, beside, train
from ntkgp.posteriors.whitened import Natural
from ntkgp.posteriors.whitening import InducingKernel
from ntkgp.priors import Prior

__all__ = ["VariationalPosterior"]

MEANS = ("network", "linear")
OBJECTIVES = ("elbo", "alpha", "predictive", "nystrom")
_NUGGET = 1e3  # times the precision of the network's numbers: Gram matrices of a thousand values are that exact
_RATE = 0.02  # of Adam's first steps in the coordinates of q and of inducing points


class VariationalPosterior(Posterior):
    r"""q(f) = ∫ p(f | u) q(u) du over M inducing values u of the process, trained on all data by minibatches.

    The process is f = μ + g with g ~ GP(0, J S₀ Jᵀ); u are values of g, seen through noise of a tiny variance ε, and
    K_ZZ + ε I = L Lᵀ, u = L v. With q(v) = N(m, S) and W = K_xZ L⁻ᵀ

    .. math:: q(f(x)) = N(\mu + W m,\; k(x, x) - W W^\top + W S W^\top)

    and over the weights Σ = S₀ − G (I − S) Gᵀ with G = S₀ J_Zᵀ L⁻ᵀ. Where a point has nothing to do with the inducing
    values, the prior's variance stays: the residual k − W Wᵀ is never dropped.

    What the bound needs of the training data, K_xZ and k(x, x), is computed once and kept if it fits the memory; then
    an epoch is linear algebra alone, also under other hyperparameters. Change one, and the next call trains q again.

    Args:
        model: the linear model on its training data.
        prior: N(m₀, S₀).
        likelihood: p(y | f).
        num_inducing: M, values: an output of a point counts one.
        inducing: "kmeans", "greedy" or "random", see :func:`ntkgp.posteriors.inducing.choose`; or an
            :class:`Inducing` of your own.
        mean: which model. "network" for μ = f(x; θ*), where the mean stays: a GP whose mean is fixed to the network.
            "linear" for μ = f_lin(x; m₀) with a free mean: the linear model itself, whose evidence is bounded.
        objective: "elbo"; "alpha" for the black-box α-energy, Σ (1/α) log E_q[p^α] − KL; "predictive" for α = 1; or
            "nystrom" for no training: Λ at the network's outputs, in one pass.
        alpha: α of "alpha", above 0 and at most 1.
        epochs: passes over the data.
        batch_size: points in a minibatch; None for all, so that steps converge to the last digit.
        num_samples: draws a point for likelihoods of several outputs.
        seed: of inducing points, order and draws.
        learn_inducing: whether the inducing points move in input space.
        nugget: ε beside the largest prior variance of an inducing value; by default 1000 times machine precision.
        checkpoint: a file that holds the state of training; if it is there already, training goes on from it.
        progress: whether to show a bar; by default in a terminal.

    Raises:
        ValueError: if a name is not known or a number cannot be.
    """

    method = "variational"

    def __init__(
        self,
        model: Any,
        prior: Prior,
        likelihood: Likelihood,
        *,
        num_inducing: int = 100,
        inducing: str | Inducing = "kmeans",
        mean: str = "network",
        objective: str = "elbo",
        alpha: float = 0.5,
        epochs: int = 10,
        batch_size: int | None = 256,
        num_samples: int = 32,
        seed: int = 0,
        learn_inducing: bool = False,
        nugget: float | None = None,
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
    ) -> None:
        super().__init__(model, prior, likelihood)
        _check(mean, objective, alpha, nugget, epochs=epochs, batch_size=batch_size, num_samples=num_samples)
        self.mean, self.objective, self.alpha = mean, objective, 1.0 if objective == "predictive" else alpha
        self.epochs, self.batch_size, self.num_samples, self.seed = epochs, batch_size, num_samples, seed
        self.checkpoint, self.progress, self.learn_inducing = checkpoint, progress, learn_inducing
        if isinstance(inducing, Inducing):
            N = count(model.source)
        else:
            inducing, N = choose(inducing, model, prior, num_inducing, seed)
        nugget = _NUGGET * torch.finfo(self.lin.dtype).eps if nugget is None else nugget
        self.lin.learn(inducing.x)
        self.points = Points(inducing, learn_inducing)
        self.process = SparseProcess(model, prior, self.points, nugget, N)
        self.q: Natural | None = None
        self._trained: list[Tensor] = []  # the hyperparameters that q was trained under

    @property
    def inducing(self) -> Inducing:
        """The inducing values."""
        return self.points.inducing()

    @property
    def num_inducing(self) -> int:
        """M."""
        return self.process.num_values

    @property
    def free(self) -> bool:
        """Whether q moves the mean."""
        return self.mean == "linear"

    @property
    def _options(self) -> dict[str, Any]:
        names = ("mean", "objective", "alpha", "epochs", "batch_size", "num_samples", "seed", "learn_inducing")
        return {name: getattr(self, name) for name in names} | {"nugget": self.process.nugget}

    # q(v)

    def _prepare(self) -> None:
        self._q()

    def _q(self, move_points: bool = True) -> Natural:
        """Return q under the current hyperparameters, trained now if it was not."""
        now = [p.detach() for p in self.parameters()]
        if self.q is None or not all(map(torch.equal, now, self._trained)):
            checkpoint, self.checkpoint = self.checkpoint, None  # training under other hyperparameters is another run
            if move_points and self.learn_inducing and self.objective != "nystrom":
                moving = {name: p for name, p in self.named_parameters() if name.startswith("points.")}
                self.train_q(self.plan(learnt=moving), beside(checkpoint, "points"))
            self.settle(self.train_q(self.plan(), checkpoint))
        assert self.q is not None
        return self.q

    def settle(self, q: Natural) -> None:
        """Take over a q that belongs to the current hyperparameters."""
        self.q, self._found = q, {}
        self._trained = [p.detach().clone() for p in self.parameters()]

    def plan(self, **changes: Any) -> Plan:
        """Return how q is trained: not at all where one pass finds the optimum, or none is looked for."""
        averages = Averages(self.alpha if self.objective in ("alpha", "predictive") else 0.0, self.num_samples)
        exact = averages.alpha == 0 and self.likelihood.curvature_atoms(self.lin.num_outputs) is not None
        epochs = 1 if self.objective == "nystrom" or (exact and not changes.get("learnt")) else self.epochs
        options = {"epochs": epochs, "batch_size": self.batch_size, "seed": self.seed, "rate": _RATE}
        return Plan(averages, **(options | changes))

    def train_q(self, plan: Plan, checkpoint: str | Path | None = None, progress: bool | None = None) -> Natural:
        """Return a trained q, and add what its epochs saw to the history."""
        q, history = train(self, plan, checkpoint, self.progress if progress is None else progress)
        self.history += history
        return q

    # q(f) and q(θ)

    @property
    def shift(self) -> Tensor | None:  # (P,)
        """δ = m₀ − θ* + G m, or None where the mean stays the network's."""
        if not self.free:
            return None
        q = self._q()
        return self._current("shift", lambda: self.prior.mean - self.lin.theta + self._pulled(q.mean.unsqueeze(0))[0])

    @shift.setter
    def shift(self, value: Tensor | None) -> None:
        if value is not None:
            raise ValueError("the mean of a sparse process follows from its inducing values: it cannot be set")

    def _now(self) -> tuple[Natural, InducingKernel, View]:
        """Return q, which training may move the inducing points for, then their kernel and L."""

        def make() -> tuple[InducingKernel, View]:
            with torch.no_grad():
                return self.process.view(False, self.free)

        return self._q(), *self._current("view", make)

    def _whitened(self, F: Features) -> tuple[Tensor, Tensor]:  # twice (n C, M)
        """Return W and V with V Vᵀ = W S Wᵀ."""
        q, kernel, view = self._now()
        K = torch.einsum("a,nacm->ncm", view.w, kernel.cross(F)).flatten(0, 1).double()
        W = solve_triangular(view.L, K.mT, upper=False).mT
        return W, q.spread(W)

    def _blocks(self, F: Features) -> Tensor:  # (n, C, C)
        W, V = (t.view(F.num_examples, F.num_outputs, -1) for t in self._whitened(F))
        own = point_blocks(F, None, self.prior.covariances()).double()
        return (own - W @ W.mT + V @ V.mT).to(F.like.dtype)

    def _memory(self, points: int) -> Callable[[Input], Callable[[], Latent]] | None:
        _, kernel, _ = self._now()
        if not kernel.by_atom or self.learn_inducing:  # what other hyperparameters, or the next training, may change
            return super()._memory(points)
        fits = points * self.process.row_bytes(len(kernel.atoms)) <= self.model.memory_budget
        return self._remembered_rows if fits else None

    def _remembered_rows(self, x: Input) -> Callable[[], Latent]:
        rows = self._now()[1].rows(x)

        def latent() -> Latent:
            q, _, view = self._now()
            found = view.marginals(rows, q)
            return Latent(found.mean.to(rows.f.dtype), valid_covariance(found.blocks.to(rows.f.dtype)))

        return latent

    def _joint(self, F: Features) -> Tensor:  # (n C, n C)
        W, V = self._whitened(F)
        return (gram(F, None, self.prior.covariances()).double() - W @ W.mT + V @ V.mT).to(F.like.dtype)

    @property
    def _bytes_per_point(self) -> int:
        return 4 * 8 * self.lin.num_outputs * self.num_inducing

    def _pushed(self, v: Tensor) -> Tensor:  # L⁻¹ J_Z v, (S, P) -> (S, M)
        _, kernel, view = self._now()
        u = kernel.Z.jvp(split(self.lin, v)).flatten(1).double()
        return solve_triangular(view.L, u.mT, upper=False).mT

    def _pulled(self, v: Tensor) -> Tensor:  # G v, (S, M) -> (S, P)
        _, kernel, view = self._now()
        u = solve_triangular(view.L.mT, v.mT, upper=True).mT.to(self.lin.dtype)
        u = u.unflatten(1, (kernel.Z.num_examples, kernel.Z.num_outputs))
        return self.prior.covariance_times(join(self.lin, kernel.Z.vjp(u)))

    def _covariance_times(self, v: Tensor) -> Tensor:  # S₀ v − G (I − S) Gᵀ v, (S, P)
        Sv, q = self.prior.covariance_times(v), self._q()
        pushed = self._pushed(Sv)
        return Sv - self._pulled(pushed - pushed @ q.covariance)

    def _centred_weights(self, n: int, generator: torch.Generator | None) -> Tensor:  # (n, P)
        r"""Draw by Matheron's rule: θ₀ + G(v − v₀), θ₀ ~ N(0, S₀), v₀ = L⁻¹(J_Z θ₀ + √ε ξ), v ~ N(0, S)."""
        (q, _, view), like = self._now(), self.lin.theta
        z = torch.randn(n, len(like), generator=generator, dtype=like.dtype, device=like.device)
        noise = torch.randn(2, n, self.num_inducing, generator=generator, dtype=torch.float64, device=like.device)
        theta = self.prior.spread(z)
        before = self._pushed(theta) + solve_triangular(view.L, (view.epsilon.sqrt() * noise[0]).mT, upper=False).mT
        v = solve_triangular(q.root.mT, noise[1].mT, upper=True).mT
        return theta + self._pulled(v - before)

    # The bound

    def bound(self, num_samples: int = 512, seed: int = 0) -> Estimate:
        """Return Σ E_q[log p(y_n | f_n)] − KL over all data, with the standard error of its draws.

        It never exceeds the log evidence of the process, whatever q is. Differentiable in prior, likelihood and
        learnable inducing points, at this q.

        Args:
            num_samples: draws for likelihoods of several outputs; others are integrated.
            seed: of the draws.
        """
        return self._bound_at(self._q(), num_samples, seed)

    def _bound_at(self, q: Natural, num_samples: int = 512, seed: int = 0) -> Estimate:
        learning, averages = self._learning(), Averages(0.0, num_samples)
        feed = self.process.feed(learning)
        kernel, view = self.process.view(learning, self.free)
        total, variance = -q.kl(), 0.0
        for i, batch in enumerate(feed.in_order()):
            for j, piece in enumerate(feed.pieces(batch, kernel)):
                marginals = view.marginals(piece.rows, q)
                E = averages(self.likelihood, piece, marginals, seed + 7919 * i + j)
                total, variance = total + surrogate(E, marginals), variance + E.standard_error**2
        return Estimate(total.to(self.lin.dtype), total.new_tensor(variance**0.5))

    def distance_to_prior(self) -> Tensor:  # ()
        """Return ½ ‖θ* − m₀‖²_{S₀⁻¹}: what the network's own weights add to the divergence from the prior."""
        return self._quadratic(torch.zeros_like(self.lin.theta))

    def _learning(self) -> bool:
        return torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())

    def log_evidence(self, at: str = "bound", curvature_at: str = "map") -> Tensor:  # ()
        r"""Return a lower bound of the log evidence, see :meth:`bound`.

        Args:
            at: "bound" for that of the process with this posterior's mean; "map", where the mean is the network's, for
                that of the linear model, from the same q: less by ½ ‖θ* − m₀‖²_{S₀⁻¹}, the share of θ* in the
                divergence of the weights from their prior.
            curvature_at: has no meaning here.
        """
        if at == "bound":
            return self.bound().value
        if at == "map" and not self.free:
            return self.bound().value - self.distance_to_prior()
        known = '"bound"' if self.free else '"bound" or "map"'
        raise ValueError(f"at must be {known} for a sparse process, but is {at!r}")

    def collapsed_bound(self) -> Tensor:  # ()
        """Return the bound at the best q for Gaussian noise, differentiable in all hyperparameters.

        Raises:
            ValueError: if the noise is not Gaussian.
        """
        if not isinstance(self.likelihood, Gaussian):
            raise ValueError(f"only Gaussian noise collapses, but the likelihood is {type(self.likelihood).__name__}")
        learning = self._learning()
        feed = self.process.feed(learning)
        kernel, view = self.process.view(learning, self.free)
        pieces = (piece for batch in feed.in_order() for piece in feed.pieces(batch, kernel))
        return collapsed_bound(self.likelihood, pieces, view).to(self.lin.dtype)

    def _log_det(self) -> Tensor:  # ()
        """Return log |I + Wᵀ Λ W|: log |B| with W Wᵀ in place of K."""
        return self._q().log_det()

    def effective_parameters(self) -> Tensor:  # (G,)
        r"""Return γ_g = P_g − α_g tr Σ_gg = tr (I − S) L⁻¹ s_g K_ZZ,g L⁻ᵀ.

        Raises:
            ValueError: if the prior has no precisions.
        """
        if not hasattr(self.prior, "precision"):
            raise ValueError(f"{type(self.prior).__name__} has no precisions to count parameters by")
        with torch.no_grad():
            q, kernel, view = self._now()
            eye = torch.eye(len(q.h)).to(q.h)
            less = eye - q.covariance
            if kernel.by_atom:
                inner = view.w[:, None, None].double() * kernel.inner.double()
                A = solve_triangular(view.L, solve_triangular(view.L, inner, upper=False).mT, upper=False)
                return torch.einsum("ij,gij->g", less, A).to(self.lin.dtype)
            G = self._pulled(eye)  # (M, P)
            by_weight = self.prior.precision_times(G) * (less @ G.double()).to(G.dtype)
            index = self.prior.precision_index
            return torch.zeros_like(self.prior.precision).index_add(0, index, by_weight.sum(0))

    def _find_mode(self, start: Tensor) -> Mode:  # (P,)
        return self.search(solver="descent", start=start)

    # Tuning and refinement

    def _tune_by_evidence(self, **options: Any) -> None:
        """Maximise a bound over the hyperparameters; see :func:`tune_sparse`."""
        from ntkgp.posteriors.sparse_tuning import tune_sparse

        tune_sparse(self, **options)

    def refine(self, method: str = "variational", **options: Any) -> Self:
        """Return a new posterior, with its own prior and likelihood, whose mean is that of the linear model.

        Args:
            method: "variational", and nothing else.
            options: that differ from this posterior's: ``epochs``, ``batch_size``, ``num_samples``, ``objective`` ...
        """
        if method != "variational":
            raise ValueError(f'method must be "variational" for a sparse process, but is {method!r}')
        refined = self.twin(deepcopy(self.prior), deepcopy(self.likelihood), **({"mean": "linear"} | options))
        refined.points = refined.process.points = Points(self.inducing, self.learn_inducing)
        refined._prepare()
        return refined

    def twin(self, prior: Prior | None = None, likelihood: Likelihood | None = None, **options: Any) -> Self:
        """Return the same process with another mean or objective; it shares inducing points, and what is kept."""
        options = self._options | {"progress": self.progress} | options
        prior, likelihood = prior or self.prior, likelihood or self.likelihood
        twin = type(self)(self.model, prior, likelihood, inducing=self.inducing, **options)
        twin.points = self.points
        twin.process = replace(self.process, prior=prior, nugget=options["nugget"], kept=dict(self.process.kept))
        return twin

    # As modules are moved

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        mean, self.mean = self.mean, "network"  # its shift is not moved but follows from q
        super()._apply(fn, recurse)
        self.mean = mean
        self.process = replace(self.process, model=self.model, kept={})
        self.q = None if self.q is None else self.q.to(self.lin.device)
        self._trained = [fn(t) for t in self._trained]
        return self


def _check(mean: str, objective: str, alpha: float, nugget: float | None, **counts: int | None) -> None:
    if mean not in MEANS:
        raise ValueError(f'mean must be "network" or "linear", but is {mean!r}')
    if objective not in OBJECTIVES:
        raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, but is {objective!r}")
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be above 0 and at most 1, but is {alpha}")
    if nugget is not None and not nugget >= 0:
        raise ValueError(f"nugget must not be negative, but is {nugget}")
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, but is {value}")
