"""Preconditioned conjugate gradients with a residual to show for it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Solution", "conjugate_gradients"]


@dataclass(frozen=True)
class Solution:
    """x with A x ≈ b, and how close it is."""

    x: Tensor
    residual: float  # ‖b − A x‖ / ‖b‖, as the recursion has it
    iterations: int


def conjugate_gradients(
    A: Callable[[Tensor], Tensor],
    b: Tensor,
    precondition: Callable[[Tensor], Tensor],
    tolerance: float,
    max_iterations: int,
) -> Solution:  # (P,)
    """Solve A x = b for symmetric positive definite A.

    Args:
        A: v -> A v.
        b: right-hand side.
        precondition: v -> M⁻¹ v for some symmetric positive definite M like A.
        tolerance: relative residual to stop at.
        max_iterations: when to give up.
    """
    x, r = torch.zeros_like(b), b.clone()
    z = precondition(r)
    p, rho = z, r @ z
    scale, iterations = b.norm(), 0
    while iterations < max_iterations and r.norm() > tolerance * scale:
        Ap = A(p)
        step = rho / (p @ Ap)
        x, r = x + step * p, r - step * Ap
        z = precondition(r)
        rho, before = r @ z, rho
        p = z + rho / before * p
        iterations += 1
    return Solution(x, (r.norm() / scale).item() if scale > 0 else 0.0, iterations)
