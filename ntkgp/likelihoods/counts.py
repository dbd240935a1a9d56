"""Counts with a logarithmic link."""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions import Poisson as PoissonDistribution

from ntkgp.likelihoods.factorized import ScalarLikelihood

__all__ = ["Poisson"]


class Poisson(ScalarLikelihood):
    r"""Poisson(y; eᶠ), independent over outputs; Λ = eᶠ."""

    def _log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        f = f.squeeze(-1)
        return y * f - f.exp() - torch.lgamma(y + 1)

    def _residual(self, y: Tensor, f: Tensor) -> Tensor:
        return y.unsqueeze(-1) - f.exp()

    def _root(self, f: Tensor) -> Tensor:
        return (f / 2).exp().unsqueeze(-1)

    def validate(self, y: Tensor, num_outputs: int) -> Tensor:  # (N, ...) -> (N, C)
        """Return the counts as floating-point numbers.

        Raises:
            ValueError: if they are not whole and non-negative, or their shape does not fit.
        """
        y = super().validate(y, num_outputs)
        if y.is_complex() or bool((y < 0).any()) or (y.is_floating_point() and bool((y != y.round()).any())):
            raise ValueError("y must hold whole, non-negative counts for a Poisson likelihood")
        return y if y.is_floating_point() else y.to(torch.get_default_dtype())

    def moments(self, f: Tensor) -> tuple[Tensor, Tensor]:  # (..., N, C)
        """Return eᶠ twice."""
        rate = f.exp()
        return rate, rate

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:  # (..., N, C)
        """Draw y given f."""
        return torch.poisson(f.exp(), generator=generator)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return Poisson(eᶠ)."""
        return PoissonDistribution(function_samples.exp())
