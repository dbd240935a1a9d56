"""Regression: Gaussian noise, the same everywhere, by output, or predicted by the network."""

import math
from typing import Any

import torch
from gpytorch.constraints import Interval, Positive
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.priors import Prior
from linear_operator.operators import DiagLinearOperator
from torch import Tensor, nn
from torch.distributions import Distribution, Normal
from torch.distributions import MultivariateNormal as TorchNormal

from ntkgp.likelihoods.base import Moments
from ntkgp.likelihoods.factorized import FactorizedLikelihood, ScalarLikelihood

__all__ = ["Gaussian", "HeteroscedasticGaussian"]


class Gaussian(ScalarLikelihood):
    r"""N(y; f, σ²), independent over outputs.

    Args:
        noise: σ², a number, or one for each output, (C,).
        learn_noise: whether tuning may change it.
        noise_prior: a hyperprior on it.
        noise_constraint: where it may lie; positive by default.

    Raises:
        ValueError: if ``noise`` is not positive and finite.
    """

    links = ("exact",)

    def __init__(
        self,
        noise: float | Tensor = 1.0,
        learn_noise: bool = True,
        noise_prior: Prior | None = None,
        noise_constraint: Interval | None = None,
    ) -> None:
        super().__init__()
        constraint = noise_constraint or Positive(transform=torch.exp, inv_transform=torch.log)
        raw = constraint.inverse_transform(_noise(noise))
        self.register_parameter("raw_noise", nn.Parameter(raw, requires_grad=learn_noise))
        self.register_constraint("raw_noise", constraint)
        if noise_prior is not None:
            self.register_prior("noise_prior", noise_prior, "noise")

    @property
    def noise(self) -> Tensor:  # () or (C,)
        """σ²."""
        return self.raw_noise_constraint.transform(self.raw_noise)

    @noise.setter
    def noise(self, value: float | Tensor) -> None:
        value = _noise(value).to(self.raw_noise).expand(self.raw_noise.shape)
        self.initialize(raw_noise=self.raw_noise_constraint.inverse_transform(value))

    def _log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        return -((y - f.squeeze(-1)).square() / self.noise + self.noise.log() + math.log(2 * math.pi)) / 2

    def _residual(self, y: Tensor, f: Tensor) -> Tensor:
        return ((y - f.squeeze(-1)) / self.noise).unsqueeze(-1)

    def _root(self, f: Tensor) -> Tensor:
        return self.noise.rsqrt().expand(f.shape[:-1])[..., None, None]

    def validate(self, y: Tensor, num_outputs: int) -> Tensor:  # (N, ...) -> (N, C)
        """Return the targets, one for each output.

        Raises:
            TypeError: if they are not floating-point numbers.
            ValueError: if their shape does not fit, or that of the noise.
        """
        y = super().validate(y, num_outputs)
        if not y.is_floating_point():
            raise TypeError(f"y must hold floating-point numbers for a Gaussian likelihood, but has dtype {y.dtype}")
        if self.noise.numel() not in (1, num_outputs):
            raise ValueError(f"noise must be a number or {num_outputs} of them, but has {self.noise.numel()}")
        return y

    def moments(self, f: Tensor) -> tuple[Tensor, Tensor]:  # (..., N, C)
        """Return f and σ²."""
        return f, self.noise.expand(f.shape)

    def closed_form(self, mean: Tensor, covariance: Tensor, link: str) -> Moments:  # (N, C), (N, C, C)
        """Return the moments of y: variances add up."""
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        return Moments(mean, variance, self.noise.expand(mean.shape), torch.zeros_like(mean))

    def gaussian_log_prob(self, y: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:  # -> (N,)
        """Return log N(y; m, Σ + σ² I), all outputs of a point together."""
        return TorchNormal(mean, self._with_noise(covariance)).log_prob(y)

    def gaussian_entropy(self, mean: Tensor, covariance: Tensor) -> Tensor:  # -> (N,)
        """Return ½ log |2πe (Σ + σ² I)|."""
        return TorchNormal(mean, self._with_noise(covariance)).entropy()

    def _with_noise(self, covariance: Tensor) -> Tensor:  # (N, C, C)
        return covariance + torch.diag_embed(self.noise.expand(covariance.shape[:-1]))

    def curvature_atoms(self, num_outputs: int) -> Tensor:  # (1, C) or (C, C)
        """Return the identity, or one unit matrix for each output with a noise of its own."""
        ones = torch.ones(num_outputs, dtype=self.noise.dtype, device=self.noise.device)
        return ones.unsqueeze(0) if self.noise.numel() == 1 else ones.diag()

    def curvature_coefficients(self) -> Tensor:  # (1,) or (C,)
        """Return 1/σ²."""
        return self.noise.reciprocal().reshape(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:  # (..., N, C)
        """Draw y given f."""
        return f + self.noise.sqrt() * torch.randn(f.shape, generator=generator, dtype=f.dtype, device=f.device)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return N(f, σ²)."""
        return Normal(function_samples, self.noise.sqrt())

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Distribution:
        """Return the distribution of y, noise added to the diagonal."""
        covariance = function_dist.lazy_covariance_matrix
        noise = self.noise.expand(function_dist.mean.shape)
        if not isinstance(function_dist, MultitaskMultivariateNormal):
            return MultivariateNormal(function_dist.mean, covariance + DiagLinearOperator(noise))
        noise = noise if function_dist._interleaved else noise.mT
        total = covariance + DiagLinearOperator(noise.flatten(-2))
        return MultitaskMultivariateNormal(function_dist.mean, total, interleaved=function_dist._interleaved)


class HeteroscedasticGaussian(FactorizedLikelihood):
    r"""N(y; μ, eˢ) with both μ and s predicted: outputs are all means, then all logarithms of variances.

    The Hessian in (μ, s) is indefinite; Λ is its expectation, the Fisher block diag(e⁻ˢ, ½).
    """

    def site_size(self, num_outputs: int) -> int:
        """Return 2."""
        return 2

    def _log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        mu, s = f.unbind(-1)
        return -((y - mu).square() * (-s).exp() + s + math.log(2 * math.pi)) / 2

    def _residual(self, y: Tensor, f: Tensor) -> Tensor:
        mu, s = f.unbind(-1)
        scaled = (y - mu) * (-s).exp()
        return torch.stack([scaled, (scaled * (y - mu) - 1) / 2], dim=-1)

    def _root(self, f: Tensor) -> Tensor:
        s = f[..., 1]
        return torch.diag_embed(torch.stack([(-s / 2).exp(), torch.full_like(s, math.sqrt(0.5))], dim=-1))

    def validate(self, y: Tensor, num_outputs: int) -> Tensor:  # (N, ...) -> (N, C / 2)
        """Return the targets, one for each pair of outputs.

        Raises:
            TypeError: if they are not floating-point numbers.
            ValueError: if their shape does not fit.
        """
        y = super().validate(y, num_outputs)
        if not y.is_floating_point():
            raise TypeError(f"y must hold floating-point numbers for a Gaussian likelihood, but has dtype {y.dtype}")
        return y

    def moments(self, f: Tensor) -> tuple[Tensor, Tensor]:  # (..., N, C) -> twice (..., N, T)
        """Return μ and eˢ."""
        mu, s = self._sites(f).unbind(-1)
        return mu, s.exp()

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:  # (..., N, T)
        """Draw y given f."""
        mu, variance = self.moments(f)
        return mu + variance.sqrt() * torch.randn(mu.shape, generator=generator, dtype=f.dtype, device=f.device)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return N(μ, eˢ)."""
        mu, variance = self.moments(function_samples)
        return Normal(mu, variance.sqrt())


def _noise(value: float | Tensor) -> Tensor:
    value = torch.as_tensor(value)
    value = value if value.is_floating_point() else value.to(torch.get_default_dtype())
    if value.ndim > 1:
        raise ValueError(f"noise must be a number or a vector, but has shape {tuple(value.shape)}")
    if not bool(((value > 0) & torch.isfinite(value)).all()):
        raise ValueError(f"noise must be positive and finite, but its smallest entry is {value.min().item():.3g}")
    return value
