"""A precision for every single parameter."""

import gpytorch
import torch
from gpytorch.constraints import Interval
from torch import Tensor

from ntkgp.linearization import Linearization
from ntkgp.priors.base import Prior, positive
from ntkgp.priors.covariance import Covariance, Elementwise

__all__ = ["Diagonal"]


class Diagonal(Prior):
    r"""S₀ = :math:`\operatorname{diag}(\alpha)^{-1}`.

    Args:
        lin: whose parameters the prior is over.
        precision: α, a number or P of them.
        mean: m₀.
        precision_prior: a hyperprior on the precisions.
        precision_constraint: where the precisions may lie; positive by default.

    Raises:
        ValueError: if a precision is not positive, or there are neither one nor P of them.
    """

    def __init__(
        self,
        lin: Linearization,
        precision: float | Tensor = 1.0,
        mean: float | Tensor | str = 0.0,
        precision_prior: gpytorch.priors.Prior | None = None,
        precision_constraint: Interval | None = None,
    ) -> None:
        super().__init__(lin, mean)
        value = positive("precision", precision).to(self.mean)
        if value.numel() not in (1, lin.num_params) or value.ndim > 1:
            raise ValueError(
                f"precision must be a number or a vector of {lin.num_params} numbers, "
                f"but has shape {tuple(value.shape)}"
            )
        self._positive("precision", value.expand(lin.num_params).clone(), precision_constraint, precision_prior)

    @property
    def precision(self) -> Tensor:  # (P,)
        """α, the precision of each parameter."""
        return self._get_positive("precision")

    @precision.setter
    def precision(self, value: float | Tensor) -> None:
        self._set_positive("precision", value)

    @property
    def precision_index(self) -> Tensor:  # (P,)
        """Every parameter has its own."""
        return torch.arange(self.layout.num_params, device=self.mean.device)

    def covariances(self) -> dict[str, Covariance]:
        """Return the variances, parameter by parameter."""
        variances = self.precision.reciprocal().split(self.layout.sizes)
        return {name: Elementwise(s) for name, s in zip(self.layout.names, variances, strict=True)}
