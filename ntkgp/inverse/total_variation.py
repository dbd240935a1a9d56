"""Anisotropic total variation: the sum of absolute differences of neighbouring pixels."""

import torch
from torch import Tensor

__all__ = ["differences", "differences_adjoint", "total_variation"]


def total_variation(x: Tensor) -> Tensor:  # (..., H, W) -> (...)
    """Return Σ |x_{i+1,j} − x_ij| + |x_{i,j+1} − x_ij|."""
    return differences(x).abs().sum(-1)


def differences(x: Tensor) -> Tensor:  # (..., H, W) -> (..., (H − 1) W + H (W − 1))
    """Return D x: differences down the columns, then along the rows."""
    return torch.cat([x.diff(dim=-2).flatten(-2), x.diff(dim=-1).flatten(-2)], dim=-1)


def differences_adjoint(d: Tensor, H: int, W: int) -> Tensor:  # (..., (H − 1) W + H (W − 1)) -> (..., H, W)
    """Return Dᵀ d."""
    down, right = d.split([(H - 1) * W, H * (W - 1)], dim=-1)
    down, right = down.unflatten(-1, (H - 1, W)), right.unflatten(-1, (H, W - 1))
    x = d.new_zeros(*d.shape[:-1], H, W)
    x[..., 1:, :] += down
    x[..., :-1, :] -= down
    x[..., 1:] += right
    x[..., :-1] -= right
    return x
