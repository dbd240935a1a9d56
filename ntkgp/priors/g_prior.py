"""A prior in the units of the data: each parameter's variance is what the data would leave it, times one number."""

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from ntkgp.linearization import Linearization
from ntkgp.priors.covariance import Covariance, Elementwise
from ntkgp.priors.grouped import Grouped

__all__ = ["GPrior"]

_FLOOR = 1e-10  # of the largest entry: parameters that data do not touch would have no bound


class GPrior(Grouped):
    r"""S₀ = :math:`\alpha_g^{-1} \operatorname{diag}(h)^{-1}`, h the diagonal of Jᵀ Λ J (Zellner 1986).

    With it features J diag(h)^(−½) have unit curvature, so that the units of inputs and weights do not matter.

    Args:
        lin: whose parameters the prior is over.
        diagonal: h, (P,); not negative. ``ntkgp.fit(..., prior="g_prior")`` computes it.
        by: as for :class:`Grouped`; all parameters together by default.
        precision: α, a number, a dict by group, or a tensor (G,).
        mean: m₀.
        floor: the least h, as a share of the largest.

    Raises:
        ValueError: if ``diagonal`` has another shape, is negative or nowhere positive.
    """

    scale: Tensor  # (P,), h⁻¹

    def __init__(
        self,
        lin: Linearization,
        diagonal: Tensor,
        by: str | Mapping[str, Sequence[str]] | None = None,
        precision: float | Mapping[str, float] | Tensor = 1.0,
        mean: float | Tensor | str = 0.0,
        floor: float = _FLOOR,
    ) -> None:
        super().__init__(lin, {"all": lin.layout.names} if by is None else by, precision, mean)
        if diagonal.shape != (lin.num_params,):
            raise ValueError(f"diagonal must have shape ({lin.num_params},), but has {tuple(diagonal.shape)}")
        if not bool((torch.isfinite(diagonal) & (diagonal >= 0)).all()) or not diagonal.any():
            raise ValueError("diagonal must be finite, not negative, and positive somewhere")
        h = diagonal.detach().to(self.mean)
        self.register_buffer("scale", h.clamp(min=floor * h.max().item()).reciprocal())

    @property
    def atoms(self) -> list[dict[str, Covariance]]:
        """diag(h)⁻¹ on each group."""
        scales = self._scales()
        return [{name: Elementwise(scales[name]) for name in names} for names in self.groups.values()]

    @property
    def atoms_key(self) -> Hashable:
        """What the atoms are, for caches."""
        return tuple(self.groups.items()), self.scale.data_ptr(), self.scale._version

    def covariances(self) -> dict[str, Covariance]:
        """Return the variances, parameter by parameter."""
        scales = self._scales()
        return {
            name: Elementwise(variance.unsqueeze(-1) * scales[name])
            for variance, names in zip(self.coefficients().unbind(-1), self.groups.values(), strict=True)
            for name in names
        }

    def _scales(self) -> dict[str, Tensor]:
        return dict(zip(self.layout.names, self.scale.split(self.layout.sizes), strict=True))
