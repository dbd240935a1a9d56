"""All weights, all correlations: one P x P matrix."""

from typing import Any

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from ntkgp.curvature import full_ggn
from ntkgp.likelihoods import SiteBlocks
from ntkgp.linearization import Features
from ntkgp.posteriors.capacitance import log_det
from ntkgp.posteriors.weight_space import WeightSpacePosterior
from ntkgp.priors import Elementwise, Uniform

__all__ = ["FullPosterior"]


class FullPosterior(WeightSpacePosterior):
    r"""Σ = (Jᵀ Λ J + S₀⁻¹)⁻¹ = L B⁻¹ Lᵀ with S₀ = L Lᵀ and B = I + Lᵀ Jᵀ Λ J L, P x P.

    Args:
        state: as for :class:`Posterior`.
        index: which weights are random, if not all are: the rest stay at θ* (needs a diagonal S₀).
    """

    method = "full"

    def __init__(self, *state: Any, index: Tensor | None = None) -> None:
        super().__init__(*state)
        self.index = index
        if index is not None and not all(
            isinstance(c, Uniform | Elementwise) for c in self.prior.covariances().values()
        ):
            raise ValueError("a subnetwork of single weights needs a prior without correlations")

    @property
    def _options(self) -> dict[str, Any]:
        return {"index": self.index}

    def _collect(self) -> Tensor:  # (atoms, P, P)
        P = self.lin.num_params if self.index is None else len(self.index)
        total = self.lin.theta.new_zeros(len(self._coefficients()), P, P)
        for chunk in self.model:
            roots = self._roots(chunk)
            for root, out in zip(roots, total, strict=True):

                def weigh(J: Tensor, some: slice, R: SiteBlocks = root) -> Tensor:
                    return self._kept_columns(R[some].mT.columns(J))

                full_ggn(chunk.F, weigh, self.lin.layout, out)
        return total

    def _kept_columns(self, J: Tensor) -> Tensor:  # (..., P) -> (..., P')
        return J if self.index is None else J[..., self.index]

    def _capacitance(self) -> Tensor:  # B, (P, P)
        H = torch.tensordot(self._coefficients(), self._statistics(), 1)
        LHL = self._whiten(self._whiten(H).mT)
        return LHL + LHL.new_ones(()).expand(len(LHL)).diag_embed()

    def _whiten(self, J: Tensor) -> Tensor:  # J L, (..., P') -> (..., P')
        if self.index is None:
            return self.prior.whiten(J)
        return J * self.prior.whiten(torch.ones_like(self.lin.theta))[self.index]

    def _unwhiten(self, z: Tensor) -> Tensor:  # (L zᵀ)ᵀ, (..., P') -> (..., P)
        if self.index is not None:
            z = z.new_zeros(*z.shape[:-1], self.lin.num_params).index_copy(-1, self.index, z)
        return self.prior.spread(z)

    def _factor(self) -> Tensor:  # Cholesky factor of B
        def factorise() -> Tensor:
            with torch.no_grad():
                return torch.linalg.cholesky(self._capacitance())

        return self._current("factor", factorise)

    def _whitened_rows(self, F: Features) -> Tensor:  # C_B⁻¹ Lᵀ Jᵀ, (P, n C)
        J = self._kept_columns(F.jacobian(self.lin.layout).flatten(0, 1))
        return solve_triangular(self._factor(), self._whiten(J).mT, upper=False)

    def _blocks(self, F: Features) -> Tensor:  # (n, C, C)
        V = self._whitened_rows(F).unflatten(1, (F.num_examples, F.num_outputs)).movedim(0, -1)
        return V @ V.mT

    def _joint(self, F: Features) -> Tensor:  # (n C, n C)
        V = self._whitened_rows(F)
        return V.mT @ V

    @property
    def _bytes_per_point(self) -> int:
        return 3 * self.lin.num_outputs * self.lin.num_params * self.lin.dtype.itemsize

    def _log_det(self) -> Tensor:  # ()
        learning = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        return log_det(self._capacitance(), self._factor()) if learning else 2 * self._factor().diagonal().log().sum()

    def _covariance_times(self, v: Tensor) -> Tensor:  # (S, P)
        w, L = self._whiten(self._kept_columns(v)).mT, self._factor()
        return self._unwhiten(solve_triangular(L.mT, solve_triangular(L, w, upper=False), upper=True).mT)

    def _newton_step(self, delta: Tensor, f: Tensor, g: Tensor, forcing: float | None = None) -> Tensor:  # (P,)
        if self.index is None:
            return super()._newton_step(delta, f, g, forcing)
        return self._at(delta)._covariance_times(g.unsqueeze(0))[0]  # of the random weights alone

    def _centred_weights(self, n: int, generator: torch.Generator | None) -> Tensor:  # (n, P)
        L = self._factor()
        z = torch.randn(n, len(L), generator=generator, dtype=L.dtype, device=L.device)
        return self._from_noise(z)

    def _from_noise(self, z: Tensor) -> Tensor:  # L C_B⁻ᵀ z, (n, P)
        return self._unwhiten(solve_triangular(self._factor().mT, z.mT, upper=True).mT)
