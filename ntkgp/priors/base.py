"""What every prior N(m₀, S₀) over the parameters offers."""

from abc import abstractmethod
from collections.abc import Hashable

import gpytorch
import torch
from gpytorch.constraints import Interval, Positive
from torch import Tensor, nn

from ntkgp.linearization import Linearization
from ntkgp.priors.covariance import Covariance, PriorCovariance, rows_times

__all__ = ["LinearPrior", "Prior"]


class Prior(gpytorch.Module):
    """N(m₀, S₀), with S₀ block diagonal over parameters.

    Args:
        lin: whose parameters the prior is over.
        mean: m₀: a number for all, a vector of P numbers, or "map" for the network's own weights θ*.

    Raises:
        ValueError: if ``mean`` is none of these, or not finite.
    """

    mean: Tensor  # (P,)

    def __init__(self, lin: Linearization, mean: float | Tensor | str = 0.0) -> None:
        super().__init__()
        self.layout = lin.layout
        self.register_buffer("mean", _mean_vector(lin, mean))

    @abstractmethod
    def covariances(self) -> dict[str, Covariance]:
        """Return the covariance of each parameter, differentiable in the hyperparameters."""

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch of priors that this is."""
        return torch.Size([])

    def covariance(self) -> PriorCovariance:  # (*batch, P, P)
        """Return S₀ as a lazy matrix."""
        return PriorCovariance.of(self.covariances(), self.layout)

    def covariance_times(self, v: Tensor) -> Tensor:  # (..., P) -> (..., P)
        """Return S₀ v."""
        return rows_times(v, self.covariances(), self.layout)

    def precision_times(self, v: Tensor) -> Tensor:  # (..., P) -> (..., P)
        """Return S₀⁻¹ v."""
        return rows_times(v, {name: cov.inverse() for name, cov in self.covariances().items()}, self.layout)

    def whiten(self, v: Tensor) -> Tensor:  # (..., P) -> (..., P)
        """Return Lᵀ v, with S₀ = L Lᵀ; of rows J it is J L."""
        return rows_times(v, {name: cov.root() for name, cov in self.covariances().items()}, self.layout)

    def spread(self, z: Tensor) -> Tensor:  # (..., P) -> (..., P)
        """Return L z: of standard normal z, draws from N(0, S₀)."""
        return rows_times(z, {name: cov.root().mT for name, cov in self.covariances().items()}, self.layout)

    @property
    def precision_index(self) -> Tensor:  # (P,)
        """Which of the precisions belongs to each parameter.

        Raises:
            ValueError: if this prior has no precisions.
        """
        raise ValueError(f"{type(self).__name__} has no precisions")

    def _positive(
        self,
        name: str,
        value: Tensor,
        constraint: Interval | None = None,
        hyperprior: gpytorch.priors.Prior | None = None,
    ) -> None:
        """Register a positive hyperparameter as ``raw_<name>`` with its constraint and optional prior.

        By default the raw parameter is the logarithm: precisions span orders of magnitude.
        """
        if constraint is None:
            constraint = Positive(transform=torch.exp, inv_transform=torch.log)
        raw = f"raw_{name}"
        self.register_parameter(raw, nn.Parameter(constraint.inverse_transform(value)))
        self.register_constraint(raw, constraint)
        if hyperprior is not None:
            self.register_prior(f"{name}_prior", hyperprior, name)

    def _get_positive(self, name: str) -> Tensor:
        return getattr(self, f"raw_{name}_constraint").transform(getattr(self, f"raw_{name}"))

    def _set_positive(self, name: str, value: float | Tensor) -> None:
        raw = getattr(self, f"raw_{name}")
        value = positive(name, value).to(raw).expand(raw.shape)
        self.initialize(**{f"raw_{name}": getattr(self, f"raw_{name}_constraint").inverse_transform(value)})


class LinearPrior(Prior):
    """A prior whose covariance is a combination of fixed ones, S₀ = Σ_j w_j S_j.

    Then K = Σ_j w_j K_j as well: the Gram matrices K_j can be kept while the coefficients w change.
    """

    @property
    @abstractmethod
    def atoms(self) -> list[dict[str, Covariance]]:
        """The fixed covariances S_j; parameters not named have none."""

    @property
    @abstractmethod
    def atoms_key(self) -> Hashable:
        """What the atoms are, for caches: equal keys, equal atoms."""

    @abstractmethod
    def coefficients(self) -> Tensor:  # (*batch, number of atoms)
        """Return w, differentiable in the hyperparameters."""


def positive(argument: str, value: float | Tensor) -> Tensor:
    """Return ``value`` as a tensor.

    Raises:
        ValueError: if an entry is not positive and finite.
    """
    value = torch.as_tensor(value)
    value = value if value.is_floating_point() else value.to(torch.get_default_dtype())
    if not bool(((value > 0) & torch.isfinite(value)).all()):
        worst = value.min().item() if value.numel() else float("nan")
        raise ValueError(f"{argument} must be positive and finite, but its smallest entry is {worst:.3g}")
    return value


def _mean_vector(lin: Linearization, mean: float | Tensor | str) -> Tensor:  # (P,)
    if isinstance(mean, str):
        if mean != "map":
            raise ValueError(f'mean must be a number, a vector of {lin.num_params} numbers or "map", but is {mean!r}')
        return lin.theta
    value = torch.as_tensor(mean, dtype=lin.dtype, device=lin.device)
    if value.ndim > 1 or (value.ndim == 1 and value.shape[0] != lin.num_params):
        raise ValueError(
            f"mean must be a number or a vector of {lin.num_params} numbers, but has shape {tuple(value.shape)}"
        )
    if not torch.isfinite(value).all():
        raise ValueError("mean holds NaN or infinity")
    return value.expand(lin.num_params).clone()
