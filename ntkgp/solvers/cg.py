"""Preconditioned conjugate gradients for several right-hand sides, with residuals to show for it."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Product", "Solution", "conjugate_gradients", "residuals"]

Product = Callable[[Tensor], Tensor]  # (S, n) -> (S, n), row by row


@dataclass(frozen=True)
class Solution:
    """x with A x ≈ b, and how close it is."""

    x: Tensor  # (S, n)
    residuals: Tensor  # (S,), ‖b − A x‖ / ‖b‖ in the norm of M⁻¹, as the recursion has it
    iterations: int
    products: int  # vectors that A was multiplied with

    @property
    def residual(self) -> float:
        """The largest of the residuals."""
        return self.residuals.max().item()


def conjugate_gradients(
    A: Product,
    b: Tensor,
    precondition: Product,
    tolerance: float,
    max_iterations: int,
    start: Tensor | None = None,
    seconds: float = float("inf"),
) -> Solution:  # (S, n)
    """Solve A x = b for symmetric positive definite A, each row by itself; a row that has converged stays.

    Residuals are measured in the norm of M⁻¹: with M like A that is the error of x in the norm of A, which is what
    falls from one iteration to the next.

    Args:
        A: v -> A v.
        b: right-hand sides, one a row.
        precondition: v -> M⁻¹ v for some symmetric positive definite M like A.
        tolerance: relative residual to stop at.
        max_iterations: when to give up.
        start: x to start from, or several, (k, S, n), as solutions of systems like this one: their combination nearest
            to the solution in the norm of A, at the price of a product each, as long as more are needed; zero by
            default.
        seconds: another budget: no iteration begins after it.
    """
    began, S = time.monotonic(), len(b)
    x, r, z, products, iterations = torch.zeros_like(b), b, precondition(b), 0, 0
    rho = (r * z).sum(1)
    enough = tolerance**2 * (scale := rho.clamp(min=torch.finfo(b.dtype).tiny))
    for found in () if start is None else _nearest(A, b, start.reshape(-1, *b.shape)):
        x, r = found
        z, products = precondition(r), products + S
        rho = (r * z).sum(1)
        if (rho <= enough).all():
            break
    p, active = z, rho > enough
    while active.any() and iterations < max_iterations and time.monotonic() - began < seconds:
        Ap = A(p)
        step = torch.where(active, rho / (p * Ap).sum(1), 0).unsqueeze(1)
        x, r = x + step * p, r - step * Ap
        z = precondition(r)
        rho, before = (r * z).sum(1), rho
        p = z + torch.where(active, rho / before, 0).unsqueeze(1) * p
        active &= rho > enough
        iterations, products = iterations + 1, products + S
    # A preconditioner that is not positive to rounding would make its own residuals: they count as infinite.
    residual = torch.where(rho < -enough, torch.inf, (rho / scale).clamp(min=0).sqrt())
    return Solution(x, residual, iterations, products)


def _nearest(A: Product, b: Tensor, V: Tensor) -> Iterator[tuple[Tensor, Tensor]]:  # (S, n), (k, S, n)
    """Yield x = Σ_i c_i v_i over the first i, row by row, with the c that minimises ‖x − A⁻¹b‖_A, and b − A x."""
    rounding = 100 * torch.finfo(b.dtype).eps
    AV = V[:0]
    for i in range(1, len(V) + 1):
        AV = torch.cat([AV, A(V[i - 1]).unsqueeze(0)])
        M = torch.einsum("isn,jsn->sij", V[:i], AV).double()
        m = torch.einsum("isn,sn->si", V[:i], b).double()
        # Solutions may be alike, or zero: what rounding does not tell apart is left out.
        c = (torch.linalg.pinv((M + M.mT) / 2, rtol=rounding, hermitian=True) @ m.unsqueeze(-1)).squeeze(-1).to(b)
        yield torch.einsum("si,isn->sn", c, V[:i]), b - torch.einsum("si,isn->sn", c, AV)


def residuals(left: Tensor, b: Tensor, precondition: Product) -> Tensor:  # (S, n), (S, n) -> (S,)
    """Return ‖b − A x‖ / ‖b‖ in the norm of M⁻¹, given what is left of b."""
    sizes = [(v * precondition(v)).sum(1).clamp(min=0) for v in (left, b)]
    return (sizes[0] / sizes[1].clamp(min=torch.finfo(b.dtype).tiny)).sqrt()
