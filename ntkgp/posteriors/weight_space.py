"""The Bayesian-linear-model view: everything through Jᵀ Λ J + S₀⁻¹, over the weights."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from ntkgp.likelihoods import SiteBlocks
from ntkgp.linearization import Features
from ntkgp.operators import gram, point_blocks
from ntkgp.posteriors.base import Posterior
from ntkgp.posteriors.mode import Mode, weight_space_mode
from ntkgp.posteriors.model import Chunk
from ntkgp.priors import Covariance
from ntkgp.priors.covariance import rows_times
from ntkgp.solvers import conjugate_gradients

__all__ = ["BlockPosterior", "WeightSpacePosterior"]

_MAX_CG = 200  # iterations for a Newton step


class WeightSpacePosterior(Posterior):
    """N(θ* + δ, Σ) over the weights, Σ from statistics of the training data that are linear in Λ.

    Where Λ = Σ_j w_j Λ_j with fixed Λ_j, as for Gaussian noise, the statistics of each Λ_j are kept, and a new noise
    costs nothing.
    """

    _kept: Any = None  # statistics that no hyperparameter changes

    @abstractmethod
    def _collect(self) -> Any:
        """Make a pass over the training data."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if isinstance(self._kept, Tensor):
            self._kept = fn(self._kept)
        elif self._kept is not None:
            self._kept = {name: block.converted(fn) for name, block in self._kept.items()}
        return self

    def _prepare(self) -> None:
        self._statistics()

    def _statistics(self) -> Any:
        if self._atoms() is None and self.sites is None and list(self.likelihood.parameters()):
            return self._current("statistics", self._collected)
        if self._kept is None:
            self._kept = self._collected()
        return self._kept

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

    def _find_mode(self, start: Tensor) -> Mode:
        return weight_space_mode(self._log_joint, self._gradient, self._newton_step, self.prior.whiten, start)

    def _newton_step(self, delta: Tensor, g: Tensor) -> Tensor:  # H(δ)⁻¹ g, (P,)
        """Solve by conjugate gradients; this posterior's own covariance is the preconditioner."""
        at = self._at(delta)
        roots = [at._site_root(chunk) for chunk in self.model]
        return self._solve(g, roots)

    def _solve(self, g: Tensor, roots: list[SiteBlocks]) -> Tensor:  # (Jᵀ R Rᵀ J + S₀⁻¹)⁻¹ g, (P,)

        def hessian(v: Tensor) -> Tensor:  # (S, P)
            out = self.prior.precision_times(v)
            for chunk, R in zip(self.model, roots, strict=True):
                out = out + chunk.pull(R.apply(R.mT.apply(chunk.push(v))))
            return out

        tolerance = torch.finfo(g.dtype).eps ** 0.5  # Newton's next step corrects what is left
        return conjugate_gradients(hessian, g.unsqueeze(0), self._covariance_times, tolerance, _MAX_CG).x[0]


class BlockPosterior(WeightSpacePosterior):
    """Σ block diagonal over parameters: predictions are those of a kernel with Σ in place of S₀."""

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
