r"""MacKay's fixed point: precisions and noise from the number of parameters that the data determine.

With α_g scaling the prior precision of group g, the log evidence has the derivative

.. math:: \frac{\partial}{\partial \log \alpha_g} = \tfrac12 (\gamma_g - q_g), \qquad
   \gamma_g = -\frac{\partial \log |B|}{\partial \log \alpha_g}, \qquad
   q_g = \frac{\partial \|\theta - m_0\|^2_{S_0^{-1}}}{\partial \log \alpha_g},

so that α_g ← α_g γ_g / q_g stays where the evidence is stationary (MacKay 1992; with one α it is γ / ‖θ − m₀‖²). For
noise σ² of n targets the same balance is σ² ← ‖y − f‖² / (n − γ).
"""

import gpytorch
import torch
from torch import Tensor

__all__ = ["derivative_in_logarithm", "noise_step", "precision_step"]

_LONGEST = 10.0  # the largest factor of one step: far from the fixed point γ / q says little


def derivative_in_logarithm(value: Tensor, owner: gpytorch.Module, name: str) -> Tensor:
    """Return ∂ value / ∂ log h for a positive hyperparameter h of ``owner``, whatever its constraint."""
    raw, h = getattr(owner, f"raw_{name}"), getattr(owner, name)
    (by_raw,) = torch.autograd.grad(value, raw, retain_graph=True, allow_unused=True)
    (slope,) = torch.autograd.grad(h.sum(), raw)
    return torch.zeros_like(raw) if by_raw is None else by_raw * h.detach() / slope


def noise_step(squares: Tensor, n: Tensor, gamma: Tensor) -> Tensor:
    """Return ‖y − f‖² / (n − γ)."""
    return squares / (n - gamma)


def precision_step(precision: Tensor, gamma: Tensor, q: Tensor) -> Tensor:  # (G,)
    """Return α γ / q, no step longer than a factor of ten; a group that nothing moves (q = 0) gets the longest."""
    factor = torch.nan_to_num(gamma / q, nan=1.0, posinf=_LONGEST)
    return precision * factor.clamp(1 / _LONGEST, _LONGEST)
