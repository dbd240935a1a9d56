"""Descent by minibatches: for sums over data of which only a few are looked at in a step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ntkgp.solvers.cg import Product, Solution, residuals

__all__ = ["Momentum", "Rows", "gradient_descent", "largest_eigenvalue"]

_MOMENTUM = 0.9
_POWER_ITERATIONS = 10
_POWER_BATCHES = 3


@dataclass(frozen=True)
class Momentum:
    """Where a descent is, and where it is heading; all there is to know for going on."""

    x: Tensor  # (S, n)
    velocity: Tensor  # (S, n)

    @classmethod
    def at(cls, x: Tensor) -> "Momentum":
        """Start at rest."""
        return cls(x, torch.zeros_like(x))

    def step(self, direction: Tensor, rate: float) -> "Momentum":
        """Return v ← β v + d, x ← x + η v (Polyak 1964)."""
        velocity = _MOMENTUM * self.velocity + direction
        return Momentum(self.x + rate * velocity, velocity)


@dataclass(frozen=True)
class Rows:
    """Some rows A_I of a tall matrix A, as products."""

    which: slice | Tensor  # I
    share: float  # of all rows
    push: Product  # x -> A_I x, (S, n) -> (S, |I|, ...)
    pull: Product  # u -> A_Iᵀ u, (S, |I|, ...) -> (S, n)


def largest_eigenvalue(A: Product, like: Tensor, generator: torch.Generator) -> float:  # (S, n)
    """Return the largest eigenvalue of A, similar to a positive definite matrix, by power iteration from below."""
    v = torch.randn(1, like.shape[1], generator=generator, dtype=torch.float64).to(like)
    size = 0.0
    for _ in range(_POWER_ITERATIONS):
        v = A(v / v.norm())
        size = v.norm().item()
    return size


def largest_over(minibatches: Iterable[Rows], A: Callable[[Rows], Product], like: Tensor, seed: int) -> float:
    """Return the largest eigenvalue of A_I over the first few minibatches I."""
    generator = torch.Generator().manual_seed(seed)
    few = (rows for rows, _ in zip(minibatches, range(_POWER_BATCHES), strict=False))
    return max(largest_eigenvalue(A(rows), like, generator) for rows in few)


def gradient_descent(
    batches: Callable[[int], Iterable[Rows]],
    inverse: Product,
    b: Tensor,
    precondition: Product,
    epochs: int,
    start: Tensor | None = None,
    seed: int = 0,
) -> Solution:  # (S, n)
    r"""Solve H x = b for H = Aᵀ A + S⁻¹, by minibatches of the rows of A.

    .. math:: \hat g = A_I^\top A_I x / s_I + S^{-1} x - b, \qquad v \leftarrow \beta v - M^{-1} \hat g,
       \qquad x \leftarrow x + \eta_t v

    with s_I the share of the rows. η falls linearly to zero, so that the noise of the minibatches averages out, from
    (1 − β) / λ_max(M⁻¹ Ĥ_I), found by power iteration over a few of them, so no rate is tuned by hand. A larger one is
    not safe: what one minibatch overshoots the next multiplies, without bound in a linear system.

    Args:
        batches: epoch -> its minibatches; what they look at should differ from epoch to epoch.
        inverse: x -> S⁻¹ x.
        b: right-hand sides, one a row.
        precondition: v -> M⁻¹ v for some symmetric positive definite M like H.
        epochs: passes over the rows.
        start: x to start from; zero by default.
        seed: of the power iteration.
    """

    def hessian(rows: Rows) -> Product:
        return lambda v: precondition(rows.pull(rows.push(v)) / rows.share + inverse(v))

    rate = (1 - _MOMENTUM) / largest_over(batches(0), hessian, b, seed)
    state, passed = Momentum.at(torch.zeros_like(b) if start is None else start), 0.0
    for epoch in range(epochs):
        for rows in batches(epoch):
            g = rows.pull(rows.push(state.x)) / rows.share + inverse(state.x) - b
            state = state.step(-precondition(g), rate * max(0.0, 1 - passed / epochs))
            passed += rows.share
    left = remainder(batches(epochs), inverse, b, state.x)
    return Solution(state.x, residuals(left, b, precondition), epochs, (epochs + 1) * len(b))


def remainder(minibatches: Iterable[Rows], inverse: Product, b: Tensor, x: Tensor) -> Tensor:  # (S, n)
    """Return b − (Aᵀ A + S⁻¹) x, from all rows of an epoch."""
    left = b - inverse(x)
    for rows in minibatches:
        left = left - rows.pull(rows.push(x))
    return left
