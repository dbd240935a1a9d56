"""Likelihoods that fall apart into sites: T independent observations a point, each of k outputs."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import gpytorch
import torch
from gpytorch.constraints import Positive
from gpytorch.distributions import MultivariateNormal
from gpytorch.utils.quadrature import GaussHermiteQuadrature1D
from torch import Tensor, nn
from torch.distributions import Normal

from ntkgp.likelihoods.base import Likelihood, point_marginals
from ntkgp.likelihoods.blocks import from_sites, to_sites

__all__ = ["FactorizedLikelihood", "ScalarLikelihood", "TemperedLikelihood"]


class FactorizedLikelihood(Likelihood):
    """p(y | f) = Π_t p(y_t | f_t), f_t of k numbers: one label a point or one a pixel, the same code.

    What a subclass writes sees sites only: y (..., T) and f (..., T, k).
    """

    @abstractmethod
    def _log_prob(self, y: Tensor, f: Tensor) -> Tensor:  # (..., T), (..., T, k) -> (..., T)
        """Return log p(y_t | f_t)."""

    @abstractmethod
    def _residual(self, y: Tensor, f: Tensor) -> Tensor:  # (..., T), (..., T, k) -> (..., T, k)
        """Return its gradient in f_t."""

    @abstractmethod
    def _root(self, f: Tensor) -> Tensor:  # (..., T, k) -> (..., T, k, k')
        """Return a root of its negative (expected) Hessian in f_t."""

    @abstractmethod
    def site_size(self, num_outputs: int) -> int:
        """Return k."""

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:  # (N, T), (..., N, C) -> (..., N)
        """Return log p(y | f) of every point."""
        return self.site_log_prob(y, f).sum(-1)

    def residual(self, y: Tensor, f: Tensor) -> Tensor:  # (..., N, C)
        """Return r."""
        return from_sites(self._residual(y, self._sites(f)))

    def site_root(self, y: Tensor, f: Tensor) -> Tensor:  # (..., N, T, k, k')
        """Return R, site by site."""
        return self._root(self._sites(f))

    def validate(self, y: Tensor, num_outputs: int) -> Tensor:  # (N, ...) -> (N, T)
        """Return the targets, one for each site.

        Raises:
            TypeError: if ``y`` is not a tensor or of the wrong dtype.
            ValueError: if its shape or its values do not fit.
        """
        y = super().validate(y, num_outputs)
        k = self.site_size(num_outputs)
        if num_outputs % k:
            raise ValueError(
                f"the network has {num_outputs} outputs, but {type(self).__name__} needs a multiple of {k}"
            )
        T = num_outputs // k
        if y.ndim == 0 or y.numel() != len(y) * T:
            raise ValueError(f"y must hold {T} value{'s' * (T > 1)} for each point, but has shape {tuple(y.shape)}")
        return y.reshape(len(y), T)

    def site_log_prob(self, y: Tensor, f: Tensor) -> Tensor:  # (..., N, T)
        """Return log p(y_t | f_t)."""
        return self._log_prob(y, self._sites(f))

    def _sites(self, f: Tensor) -> Tensor:  # (..., C) -> (..., T, k)
        return to_sites(f, self.site_size(f.shape[-1]))


class TemperedLikelihood(FactorizedLikelihood):
    r"""p(y | f) = p₁(y | f / τ): logits under a temperature, as temperature scaling has it (Guo et al. 2017).

    ``_log_prob``, ``_residual`` and ``_root`` of a subclass see logits f / τ; r and R of f are 1 / τ times theirs. τ is
    for validation data to choose, ``tune(validation=..., temperatures=...)``: training data, which the network fits,
    would ask for less and less. Posteriors whose Λ is kept as it was, after a variational refinement or from training
    with uncertainty, follow τ in their probabilities alone.

    Args:
        temperature: τ.

    Raises:
        ValueError: if it is not positive and finite.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.register_parameter("raw_temperature", nn.Parameter(torch.zeros(()), requires_grad=False))
        self.register_constraint("raw_temperature", Positive(transform=torch.exp, inv_transform=torch.log))
        self.temperature = temperature

    @property
    def temperature(self) -> Tensor:  # ()
        """τ."""
        return self.raw_temperature_constraint.transform(self.raw_temperature)

    @temperature.setter
    def temperature(self, value: float | Tensor) -> None:
        raw = self.raw_temperature
        value = torch.as_tensor(value, dtype=raw.dtype, device=raw.device)
        if value.numel() != 1 or not (torch.isfinite(value) & (value > 0)).all():
            raise ValueError(f"temperature must be one positive, finite number, but is {value.tolist()}")
        self.initialize(raw_temperature=self.raw_temperature_constraint.inverse_transform(value.view(())))

    def residual(self, y: Tensor, f: Tensor) -> Tensor:  # (..., N, C)
        """Return r."""
        return super().residual(y, f) / self.temperature

    def site_root(self, y: Tensor, f: Tensor) -> Tensor:  # (..., N, T, k, k')
        """Return R, site by site."""
        return super().site_root(y, f) / self.temperature

    def _sites(self, f: Tensor) -> Tensor:  # (..., C) -> (..., T, k)
        return super()._sites(f) / self.temperature


class ScalarLikelihood(FactorizedLikelihood):
    """One output a site: expectations under Gaussians are integrals over a line."""

    def site_size(self, num_outputs: int) -> int:
        """Return 1."""
        return 1

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:  # (..., N)
        """Return E[log p(y | f)] of every point; only the variances of its outputs matter."""
        mean, blocks = point_marginals(function_dist)
        y = self._by_point(observations, function_dist)
        return self._expectation(lambda f: self.site_log_prob(y, f), mean, blocks).sum(-1)

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:  # (..., N)
        """Return log E[p(y | f)] of every point."""
        mean, blocks = point_marginals(function_dist)
        if mean.shape[-1] > 1:  # correlated outputs
            return super().log_marginal(observations, function_dist)
        y = self._by_point(observations, function_dist)
        return self._expectation(lambda f: self.site_log_prob(y, f).exp(), mean, blocks).sum(-1).log()

    def _expectation(self, function: Callable[[Tensor], Tensor], mean: Tensor, blocks: Tensor) -> Tensor:
        """Integrate a function of each output over its Gaussian."""
        quadrature = GaussHermiteQuadrature1D(gpytorch.settings.num_gauss_hermite_locs.value())
        std = blocks.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
        return quadrature(function, Normal(mean, std, validate_args=False))
