"""Stochastic dual descent: the same systems, with a number for every row instead of a noisy gradient."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ntkgp.solvers.cg import Product, Solution, residuals
from ntkgp.solvers.descent import Rows, largest_over, remainder

__all__ = ["dual_descent"]


def dual_descent(
    batches: Callable[[int], Iterable[Rows]],
    covariance: Product,
    inverse: Product,
    b: Tensor,
    shape: tuple[int, ...],
    epochs: int,
    start: Tensor | None = None,
    seed: int = 0,
) -> Solution:  # (S, n)
    r"""Solve (Aᵀ A + S⁻¹) x = b through its dual (I + A S Aᵀ) u = A S b, by minibatches of u.

    With x = S(b − Aᵀ u) carried along, the residual of the dual at rows I is A_I x − u_I: it costs what a minibatch
    gradient costs, and vanishes at the solution for every minibatch, so that a fixed rate converges (Lin et al. 2024).
    With η = 1 / λ_max(I + A_I S A_Iᵀ) no step goes uphill. There is no momentum: a block that moves on after it was
    looked at overshoots.

    Args:
        batches: epoch -> its minibatches.
        covariance: x -> S x.
        inverse: x -> S⁻¹ x, for the residual that is reported.
        b: right-hand sides, one a row.
        shape: of the rows of A, as ``push`` returns and ``which`` indexes them.
        epochs: passes over the rows.
        start: x to start from, at the price of two passes.
        seed: of the power iteration.
    """

    def block(rows: Rows) -> Product:  # S A_Iᵀ A_I + I has the eigenvalues of I + A_I S A_Iᵀ
        return lambda v: v + covariance(rows.pull(rows.push(v)))

    rate = 1 / largest_over(batches(0), block, b, seed)
    u = torch.zeros(len(b), *shape, dtype=b.dtype, device=b.device)
    x = covariance(b)
    if start is not None:
        for rows in batches(0):
            u[:, rows.which] = rows.push(start)
            x = x - covariance(rows.pull(u[:, rows.which]))
    for epoch in range(epochs):
        for rows in batches(epoch):
            step = rate * (rows.push(x) - u[:, rows.which])
            u[:, rows.which] += step
            x = x - covariance(rows.pull(step))
    left = remainder(batches(epochs), inverse, b, x)
    return Solution(x, residuals(left, b, covariance), epochs, (epochs + 1) * len(b))
