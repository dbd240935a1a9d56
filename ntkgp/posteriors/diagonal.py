"""Every weight by itself."""

from typing import Any

import torch
from torch import Tensor

from ntkgp.curvature import diagonal_ggn
from ntkgp.posteriors.model import join
from ntkgp.posteriors.weight_space import BlockPosterior
from ntkgp.priors import Covariance, Elementwise, Uniform

__all__ = ["DiagonalPosterior"]


class DiagonalPosterior(BlockPosterior):
    r"""Σ = diag(h + 1/s₀)⁻¹ with h the exact diagonal of Jᵀ Λ J; needs a prior without correlations."""

    method = "diag"

    def __init__(self, *state: Any) -> None:
        super().__init__(*state)
        if not all(isinstance(cov, Uniform | Elementwise) for cov in self.prior.covariances().values()):
            raise ValueError('method="diag" needs a prior without correlations: Isotropic, Grouped or Diagonal')

    def _collect(self) -> Tensor:  # (atoms, P)
        total = self.lin.theta.new_zeros(len(self._coefficients()), self.lin.num_params)
        for chunk in self.model:
            found = torch.stack([join(self.lin, diagonal_ggn(chunk.F, root.mT.columns)) for root in self._roots(chunk)])
            total = total + found
        return total

    def _diagonal(self) -> Tensor:  # h, (P,)
        return torch.tensordot(self._coefficients(), self._statistics(), 1)

    def _prior_variances(self) -> Tensor:  # (P,)
        return self.prior.covariance_times(torch.ones_like(self.lin.theta))

    def _covariances(self) -> dict[str, Covariance]:
        variances = (self._diagonal() + self._prior_variances().reciprocal()).reciprocal()
        parts = variances.split(self.lin.layout.sizes)
        return {name: Elementwise(part) for name, part in zip(self.lin.layout.names, parts, strict=True)}

    def _log_det(self) -> Tensor:  # ()
        return torch.log1p(self._prior_variances() * self._diagonal()).sum()
