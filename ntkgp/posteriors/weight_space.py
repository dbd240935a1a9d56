"""The Bayesian-linear-model view: everything through Jᵀ Λ J + S₀⁻¹, over the weights."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ntkgp.likelihoods import SiteBlocks
from ntkgp.linearization import Features
from ntkgp.operators import gram, point_blocks
from ntkgp.posteriors.base import Posterior
from ntkgp.posteriors.checkpoint import Checkpoint
from ntkgp.posteriors.mode import Mode, WeightSpaceProblem, weight_space_mode
from ntkgp.posteriors.model import Chunk
from ntkgp.priors import Covariance
from ntkgp.priors.covariance import rows_times
from ntkgp.solvers import Product, Solution, conjugate_gradients

__all__ = ["BlockPosterior", "WeightSpacePosterior"]


_INEXACT = 0.1  # relative residual of a Newton step when the mode need not be exact


class WeightSpacePosterior(Posterior):
    """N(θ* + δ, Σ) over the weights, Σ from statistics of the training data that are linear in Λ.

    Where Λ = Σ_j w_j Λ_j with fixed Λ_j, as for Gaussian noise, the statistics of each Λ_j are kept, and a new noise
    costs nothing.
    """

    _kept: Any = None  # statistics of the training data
    _kept_under: Sequence[Tensor] = ()  # the hyperparameters of the likelihood that they depend on

    @abstractmethod
    def _collect(self) -> Any:
        """Make a pass over the training data."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if isinstance(self._kept, Tensor):
            self._kept = fn(self._kept)
        elif self._kept is not None:
            self._kept = {name: block.converted(fn) for name, block in self._kept.items()}
        self._kept_under = [fn(p) for p in self._kept_under]
        return self

    def _prepare(self) -> None:
        with torch.no_grad():
            self._statistics()

    def _statistics(self) -> Any:
        now = self._curvature_parameters()
        if torch.is_grad_enabled() and any(p.requires_grad for p in now):
            raise NotImplementedError(
                f"weight space keeps Jᵀ Λ J, and does not differentiate it in the hyperparameters of "
                f'{type(self.likelihood).__name__}: use method="function", or fix them with requires_grad_(False)'
            )
        if self._kept is None or not all(map(torch.equal, now, self._kept_under)):
            self._kept = None  # before there are two
            self._keep(self._collected())
        return self._kept

    def _curvature_parameters(self) -> list[nn.Parameter]:
        """Return the hyperparameters of the likelihood that the statistics depend on."""
        return list(self.likelihood.parameters()) if self._atoms() is None and self.sites is None else []

    def _keep(self, statistics: Any) -> None:
        """Take over statistics that belong to the hyperparameters as they are."""
        self._kept, self._kept_under = statistics, [p.detach().clone() for p in self._curvature_parameters()]

    def _collected(self) -> Any:
        with torch.no_grad():
            return self._collect()

    def _roots(self, chunk: Chunk) -> list[SiteBlocks]:
        """Return a root of Λ, or of each Λ_j, at the points of a chunk."""
        atoms = self._atoms()
        if atoms is None:
            return [self._site_root(chunk)]
        n, w = len(chunk.data), chunk.data.weights
        roots = atoms.sqrt().unsqueeze(1).expand(-1, n, -1)  # (atoms, n, C)
        if w is not None:
            roots = roots * (w if w.ndim == 2 else w.unsqueeze(-1)).sqrt()
        return [SiteBlocks(root[..., None, None]) for root in roots]

    def _atoms(self) -> Tensor | None:  # (atoms, C)
        return None if self.sites is not None else self.likelihood.curvature_atoms(self.lin.num_outputs)

    def _coefficients(self) -> Tensor:  # (atoms,)
        if self._atoms() is None:
            return torch.ones_like(self.lin.theta[:1])
        return self.likelihood.curvature_coefficients()

    # The mode

    _newton_tolerance: float | None = None  # of the linear system of a Newton step; by default half of the digits
    _mode_tolerance: float | None = None  # of the mode; by default to rounding

    def newton(  # type: ignore[override]
        self,
        tolerance: float = 1e-2,
        steps: int = 100,
        start: Tensor | None = None,
        checkpoint: str | Path | None = None,
    ) -> Mode:
        """Return θ_⋆ − θ* within a tolerance, by inexact Newton steps: passes of J v and Jᵀu over the data.

        Args:
            tolerance: for the error of θ in the norm of the Hessian, beside ‖θ_⋆ − m₀‖ in that of the prior.
            steps: of Newton's method, at most; the certificate says whether they were enough.
            start: δ to start from; by default where the posterior is.
            checkpoint: a file that holds δ after every step; if it is there already, the search goes on from it.

        Raises:
            ValueError: if ``tolerance`` is not positive, or the checkpoint belongs to another network.
        """
        if not tolerance > 0:
            raise ValueError(f"tolerance must be positive, but is {tolerance}")
        if start is None:
            start = torch.zeros_like(self.lin.theta) if self.shift is None else self.shift
        visit: Callable[[Tensor], None] = lambda delta: None  # noqa: E731
        if checkpoint is not None:
            kept = Checkpoint(Path(checkpoint), {"fingerprint": self.lin.fingerprint()})
            if kept.path.exists():
                start = kept.load()[0]["delta"].to(start)
            if self.model.ranks.rank == 0:
                visit = lambda delta: kept.save({"delta": delta}, {})  # noqa: E731
        with torch.no_grad():
            return self._newton(start, tolerance, _INEXACT, steps, visit)

    def _find_mode(self, start: Tensor) -> Mode:
        return self._newton(start, self._mode_tolerance, self._newton_tolerance)

    def _newton(self, start: Tensor, tolerance: float | None, forcing: float | None, *budget: Any) -> Mode:  # (P,)
        problem = WeightSpaceProblem(
            self._log_prob_at,
            self._quadratic,
            self._gradient_at,
            lambda delta, f, g: self._newton_step(delta, f, g, forcing),
            lambda v: self.model.push(v.unsqueeze(0))[0],
            self.prior.whiten,
        )
        return weight_space_mode(problem, start, self._f_train(), tolerance, self._first_step(start), *budget)

    def _f_train(self) -> Tensor:  # (N, C)
        """Return the network's outputs at our training points."""
        return self.model.f()

    def _first_step(self, start: Tensor) -> Tensor | None:  # (P,)
        """Return the Newton step from here if it is known already."""
        return None

    def _newton_step(self, delta: Tensor, f: Tensor, g: Tensor, forcing: float | None = None) -> Tensor:  # H⁻¹ g, (P,)
        """Solve by conjugate gradients, with Λ at latent values f."""
        tolerance = forcing or torch.finfo(g.dtype).eps ** 0.5  # the next step corrects what is left
        root, precondition = lambda chunk: self._expand(chunk, f[chunk.points]).R, self._preconditioner_at(delta)
        return self._solve(g.unsqueeze(0), root, tolerance, precondition=precondition).x[0]

    def _solve(
        self,
        b: Tensor,
        root: Callable[[Chunk], SiteBlocks],
        tolerance: float,
        start: Tensor | None = None,
        precondition: Product | None = None,
    ) -> Solution:  # (Jᵀ R Rᵀ J + S₀⁻¹)⁻¹ b, (S, P)
        def hessian(v: Tensor) -> Tensor:  # (S, P)
            return self.prior.precision_times(v) + self._ggn_times(v, root)

        return conjugate_gradients(hessian, b, precondition or self._precondition, tolerance, self._max_cg, start)

    def _ggn_times(self, v: Tensor, root: Callable[[Chunk], SiteBlocks]) -> Tensor:  # Jᵀ R Rᵀ J v, (S, P)
        """Make a pass over the data."""
        out = torch.zeros_like(v)
        for chunk in self.model:
            R = root(chunk)
            out += chunk.pull(R.apply(R.mT.apply(chunk.push(v))))
        return self.model.summed(out)

    _max_cg = 200  # iterations

    def _preconditioner_at(self, delta: Tensor) -> Product:  # (P,)
        """Return M⁻¹ for the Hessian with Λ at θ* + δ: the same, as new statistics would cost a pass over the data."""
        return self._precondition

    def _precondition(self, v: Tensor) -> Tensor:  # (S, P)
        """Return M⁻¹ v for some M like the Hessian: this posterior's own covariance."""
        return self._covariance_times(v)


class BlockPosterior(WeightSpacePosterior):
    """Σ block diagonal over parameters: predictions are those of a kernel with Σ in place of S₀."""

    _moves_cheaply = True

    @abstractmethod
    def _covariances(self) -> dict[str, Covariance]:
        """Return Σ parameter by parameter."""

    def _now(self) -> dict[str, Covariance]:
        def make() -> dict[str, Covariance]:
            with torch.no_grad():
                return self._covariances()

        return self._current("covariances", make)

    @property
    def _bytes_per_point(self) -> int:
        return 2 * self.lin.num_outputs * self.lin.num_params * self.lin.dtype.itemsize  # where layers are contracted

    def _blocks(self, F: Features) -> Tensor:  # (n, C, C)
        return point_blocks(F, None, self._now())

    def _joint(self, F: Features) -> Tensor:  # (n C, n C)
        return gram(F, None, self._now())

    def _covariance_times(self, v: Tensor) -> Tensor:  # (S, P)
        return rows_times(v, self._now(), self.lin.layout)

    def _centred_weights(self, n: int, generator: torch.Generator | None) -> Tensor:  # (n, P)
        like = self.lin.theta
        z = torch.randn(n, len(like), generator=generator, dtype=like.dtype, device=like.device)
        return rows_times(z, {name: cov.root().mT for name, cov in self._now().items()}, self.lin.layout)
