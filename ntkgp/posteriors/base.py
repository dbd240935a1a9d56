"""What every posterior offers: one protocol for both spaces and all structures."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor
from tqdm.auto import tqdm

from ntkgp.evidence import derivative_in_logarithm
from ntkgp.likelihoods import Likelihood, SiteBlocks
from ntkgp.linearization import Features
from ntkgp.linearization.inputs import Input, batch_size, leaves, map_leaves, take, wants_grad
from ntkgp.posteriors.mode import Certificate
from ntkgp.posteriors.model import split
from ntkgp.posteriors.objective import LinearObjective
from ntkgp.posteriors.prediction import Latent, Prediction, predictive_of, valid_covariance
from ntkgp.priors import Prior

__all__ = ["Posterior"]

_PREDICT_BYTES = 256 << 20  # what the features of the points that are predicted together may take


class Posterior(LinearObjective):
    r"""q(θ) = N(θ* + δ, Σ), and with it q(f(x)) = N(f(x; θ*) + J(x) δ, J(x) Σ J(x)ᵀ).

    Prior and likelihood are live: change a hyperparameter and the next call factorises again; the network is never
    differentiated again on the training data.

    Args:
        state: the linear model on its training data; the prior; the likelihood; δ, or None for zero; R at the
            training points, if it is not that of the likelihood at f + J δ.
    """

    def __init__(self, *state: Any) -> None:
        super().__init__(*state)
        self.reason = ""  # why this method, if it was chosen for the user
        self.certificate: Certificate | None = None  # how well a refined mean satisfies its equation
        self.history: list[dict[str, Any]] = []  # one entry for each step of tuning

    # What a structure defines

    @abstractmethod
    def _prepare(self) -> None:
        """Do what a prediction needs of the training data now, so that what fails, fails in ``fit``."""

    @abstractmethod
    def _blocks(self, F: Features) -> Tensor:  # (n, C, C)
        """Return the posterior covariance of each point's outputs."""

    @abstractmethod
    def _joint(self, F: Features) -> Tensor:  # (n C, n C)
        """Return the posterior covariance of all points' outputs."""

    @abstractmethod
    def _log_det(self) -> Tensor:  # ()
        """Return log |B|, differentiable in the hyperparameters."""

    @abstractmethod
    def _centred_weights(self, n: int, generator: torch.Generator | None) -> Tensor:  # (n, P)
        """Draw θ less its posterior mean."""

    @abstractmethod
    def _covariance_times(self, v: Tensor) -> Tensor:  # (S, P) -> (S, P)
        """Return Σ v."""

    _moves_cheaply = False  # whether other hyperparameters cost little beside a batch of predictions

    @property
    def _options(self) -> dict[str, Any]:
        """What else the constructor takes."""
        return {}

    @property
    def _bytes_per_point(self) -> int:
        """What a predicted point takes beside its features."""
        return 0

    # q(f)

    def latent(self, x: Input, joint: bool = False) -> MultivariateNormal:
        """Return q(f(x)): of each point by itself, batch (N,) and event (C,), or of all points jointly.

        Differentiable in x where x requires gradients; hyperparameters count as constants.

        Args:
            x: N points. If ``joint``, leading dimensions (b, q, ...) give b distributions over q points each.
            joint: whether to return the N x C values jointly, as a MultitaskMultivariateNormal.
        """
        with torch.no_grad():
            self._prepare()  # which may learn
        with torch.set_grad_enabled(wants_grad(x)), self._constant():
            if joint:
                return self._joint_latent(x)
            parts = list(self._latents(x))
            mean, covariance = zip(*(part.gaussian for part in parts), strict=True)
            # Lazy, as GPyTorch would factorise a dense matrix at once, and these may be singular.
            return MultivariateNormal(torch.cat(mean), to_linear_operator(torch.cat(covariance)))

    def _latents(self, x: Input) -> Iterator[Latent]:
        for part in self._predicted_together(x):
            yield self._latent(self.lin(part), self.lin.features(part))

    def _latent(self, f: Tensor, F: Features) -> Latent:  # (n, C)
        return Latent(self._mean(f, F), valid_covariance(self._blocks(F)))

    def _memory(self, points: int) -> "Callable[[Input], Callable[[], Latent]] | None":
        """Return what asks the network at some points, to tell q(f) there under the hyperparameters of the moment.

        Args:
            points: how many there are in all; None comes back if what would be kept of them does not fit the budget.
        """
        return self._remembered if points * self.model._bytes_each <= self.model.memory_budget else None

    def _remembered(self, x: Input) -> Callable[[], Latent]:
        f, F = self.lin(x), self.lin.features(x)
        return lambda: self._latent(f, F)

    def _mean(self, f: Tensor, F: Features) -> Tensor:  # (n, C)
        return f if self.shift is None else f + F.jvp(split(self.lin, self.shift.unsqueeze(0)))[0]

    def _joint_latent(self, x: Input) -> MultitaskMultivariateNormal:
        extra = leaves(x)[0].ndim - leaves(self.lin.example)[0].ndim
        if extra > 1:
            raise ValueError(f"x has {extra} dimensions too many: joint latents take (q, ...) or (b, q, ...)")
        if extra == 0:
            x = map_leaves(lambda leaf: leaf.unsqueeze(0), x)
        q = leaves(x)[0].shape[1]
        means, covariances = [], []
        groups = max(1, self._batch(_points(x)) // q)  # of q points each, that are looked at together
        for start in range(0, batch_size(x), groups):
            points = _points(take(x, slice(start, start + groups)))
            F = self.lin.features(points)
            means.append(self._mean(self.lin(points), F).unflatten(0, (-1, q)))
            if q == 1:
                covariances.append(self._blocks(F))
            else:
                covariances += [self._joint(F[i : i + q]).unsqueeze(0) for i in range(0, F.num_examples, q)]
        mean, covariance = torch.cat(means), valid_covariance(torch.cat(covariances))
        if extra == 0:
            mean, covariance = mean[0], covariance[0]
        return MultitaskMultivariateNormal(mean, to_linear_operator(covariance))

    @contextmanager
    def _constant(self) -> Iterator[None]:
        """Keep hyperparameters out of graphs: factors that are kept have none, so derivatives would lack a part."""
        learnt = [p for p in self.parameters() if p.requires_grad]
        try:
            for p in learnt:
                p.requires_grad_(False)
            yield
        finally:
            for p in learnt:
                p.requires_grad_(True)

    def _predicted_together(self, x: Input) -> Iterator[Input]:
        for start in range(0, batch_size(x), step := self._batch(x)):
            yield take(x, slice(start, start + step))

    def _batch(self, x: Input) -> int:
        """How many points are predicted together."""
        self.lin.learn(x)
        each = self.lin.pilot().nbytes // 2 + self._bytes_per_point
        return max(1, _PREDICT_BYTES // max(1, each))

    # p(y)

    def predict(
        self,
        x: Input,
        predictive: str = "glm",
        link: str | None = None,
        num_samples: int = 256,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> Prediction:
        """Return the predictive distribution of y at each point.

        Args:
            x: the points, any number: they are batched here.
            predictive: "glm" for the linear model, "bnn" for weight samples pushed through the network itself, "map"
                for the network alone.
            link: how the Gaussian over f becomes a distribution of y: "mc" by samples with the full C x C
                covariance, "probit" and "bridge" in closed form where the likelihood has them; by default exact if
                possible, "mc" otherwise.
            num_samples: how many samples "mc" and "bnn" take.
            generator: where randomness comes from; by default seed 0, so that predictions repeat.
            progress: whether to show a bar; by default in a terminal, if there is more than one batch.

        Raises:
            ValueError: if ``predictive`` or ``link`` is not known for this likelihood.
        """
        if predictive not in ("glm", "bnn", "map"):
            raise ValueError(f'predictive must be "glm", "bnn" or "map", but is {predictive!r}')
        generator = generator or torch.Generator(self.lin.device).manual_seed(0)
        with torch.no_grad():
            if predictive == "glm":
                latents = self._latents(x)
            elif predictive == "map":
                latents = (Latent(samples=self.lin(part).unsqueeze(0)) for part in self._predicted_together(x))
            else:
                theta = self.sample_weights(num_samples, generator)
                latents = (
                    Latent(samples=torch.stack([self.lin(part, row) for row in theta]))
                    for part in self._predicted_together(x)
                )
            count = -(-batch_size(x) // self._batch(x))
            hidden = True if count == 1 else None if progress is None else not progress
            latents = tqdm(latents, total=count, desc="predict", disable=hidden)
            return predictive_of(self.likelihood, latents, link, num_samples, generator)

    # Samples

    def sample_weights(self, n: int, generator: torch.Generator | None = None) -> Tensor:  # (n, P)
        """Draw n weight vectors."""
        if n < 1:
            raise ValueError(f"n must be at least 1, but is {n}")
        with torch.no_grad():
            theta = self.lin.theta if self.shift is None else self.lin.theta + self.shift
            return theta + self._centred_weights(n, generator)

    def sample_functions(self, n: int, generator: torch.Generator | None = None) -> Callable[[Input], Tensor]:
        """Draw n functions of the linear model: callables x -> (n, N, C)."""
        moved = self.sample_weights(n, generator) - self.lin.theta

        def functions(x: Input) -> Tensor:
            with torch.no_grad():
                parts = [
                    self.lin(part) + self.lin.features(part).jvp(split(self.lin, moved))
                    for part in self._predicted_together(x)
                ]
                return torch.cat(parts, dim=1)

        return functions

    # Evidence

    def log_evidence(self, at: str = "linear_mode", curvature_at: str = "map") -> Tensor:  # ()
        r"""Return the Laplace evidence log p(y | f_lin(θ)) − ½ ‖θ − m₀‖²_{S₀⁻¹} − ½ log |B|.

        Differentiable in the hyperparameters of prior and likelihood. At the linear mode the first two terms are
        stationary in θ, so their gradient is that at fixed θ.

        Args:
            at: "linear_mode" for θ_⋆, exact for Gaussian likelihoods; "map" for θ*, as MacKay has it.
            curvature_at: where Λ in B is evaluated: "map" for where this posterior has it, or "linear_mode".
        """
        if at not in ("linear_mode", "map"):
            raise ValueError(f'at must be "linear_mode" or "map", but is {at!r}')
        if curvature_at not in ("linear_mode", "map"):
            raise ValueError(f'curvature_at must be "linear_mode" or "map", but is {curvature_at!r}')
        here = torch.zeros_like(self.lin.theta)
        log_joint = self._log_joint(here) if at == "map" else self._log_joint_at_mode()
        posterior = self if curvature_at == "map" else self._at(self.linear_mode().delta)
        return log_joint - posterior._log_det() / 2

    def effective_parameters(self) -> Tensor:  # (G,)
        r"""Return γ, how many parameters of each group the data determine: −∂ log |B| / ∂ log α_g.

        With Σ the posterior covariance this is P_g − α_g tr Σ_gg; all groups together have at most min(P, N C).

        Raises:
            ValueError: if the prior has no precisions.
        """
        if not hasattr(self.prior, "precision"):
            raise ValueError(f"{type(self.prior).__name__} has no precisions to count parameters by")
        raw = self.prior.raw_precision
        with self._constant():
            try:
                raw.requires_grad_(True)
                with torch.enable_grad():
                    return -derivative_in_logarithm(self._log_det(), self.prior, "precision")
            finally:
                raw.requires_grad_(False)

    # Tuning and refinement

    def tune(self, at: str | None = None, validation: Any = None, **options: Any) -> Self:
        """Maximise the evidence at the linear mode or the map, or a score on validation data; see :func:`tune`."""
        from ntkgp.posteriors.tuning import tune  # it knows posteriors, so it cannot come before them

        tune([self], at, validation, **options)
        return self

    def _tune_by_evidence(self, **options: Any) -> None:
        from ntkgp.posteriors.tuning import by_evidence

        by_evidence(self, **options)

    def refine(self, method: str = "laplace", **options: Any) -> Self:
        """Return a new posterior, with its own prior and likelihood, whose mean is that of the linear model.

        Args:
            method: "laplace" for the mode θ_⋆ with Λ there; "variational" for the Gaussian that minimises the
                Kullback-Leibler divergence, K⁻¹(m − μ₀) = E_q[r] and S = (K⁻¹ + E_q[Λ])⁻¹.
            options: of the variational method, or of an approximate search for the mode, for data that are streamed or
                many, see :meth:`search`: ``solver="descent"`` with ``data``, ``epochs``, ``batch_size`` ..., or Newton
                steps with ``tolerance``, ``steps`` and ``checkpoint``.
        """
        if method == "laplace":
            mode = self.search(**options) if options else self.linear_mode()
            refined = self._at(mode.delta, deepcopy(self.prior), deepcopy(self.likelihood))
            refined.certificate = mode.certificate
            return refined
        if method == "variational":
            from ntkgp.posteriors.variational import refine_variationally

            return refine_variationally(self, **options)
        raise ValueError(f'method must be "laplace" or "variational", but is {method!r}')

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write this posterior into a folder; see :func:`ntkgp.load`."""
        from ntkgp.posteriors.storage import save

        save(self, path, overwrite)

    def _at(
        self,
        shift: Tensor | None,
        prior: Prior | None = None,
        likelihood: Likelihood | None = None,
        sites: SiteBlocks | None = None,
    ) -> Self:
        """Return the same posterior with its mean, and Λ, elsewhere."""
        return type(self)(self.model, prior or self.prior, likelihood or self.likelihood, shift, sites, **self._options)


def _points(x: Input) -> Input:  # (b, q, ...) -> (b q, ...)
    return map_leaves(lambda leaf: leaf.flatten(0, 1), x)
