"""Maximise a smooth function of logarithmic hyperparameters that may fail where matrices lose rank."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Step", "maximise"]

_MEMORY = 10  # pairs of differences that make up the metric
_LONGEST = 2.0  # a step changes no logarithm by more: evidences are far from quadratic over orders of magnitude
_SHORTEST = 1e-8


@dataclass(frozen=True)
class Step:
    """One accepted point of the ascent."""

    value: float
    gradient_norm: float


def maximise(
    objective: Callable[[], Tensor], parameters: list[nn.Parameter], steps: int, tolerance: float
) -> Iterator[Step]:
    r"""Climb by L-BFGS directions, shortening a step until it gains; yield every accepted point, the start first.

    A point where ``objective`` raises a linear-algebra error or is not finite counts as no gain. Ends when the
    gradient, relative to 1 + |value|, or what a step gains falls below the tolerance, or after so many steps.

    Args:
        objective: evaluates the function at the current parameters, with its graph.
        parameters: what to change, in place.
        steps: at most so many steps.
        tolerance: relative to 1 + |value|.
    """
    x = _flat(parameters)
    value, gradient = _evaluate(objective, parameters)
    if value is None:
        raise RuntimeError("the evidence cannot be evaluated at the hyperparameters to start from")
    yield Step(value, gradient.norm().item())
    pairs: list[tuple[Tensor, Tensor]] = []
    for _ in range(steps):
        if gradient.norm() <= tolerance * (1 + abs(value)):
            return
        direction = _direction(gradient, pairs)
        size = min(1.0, _LONGEST / direction.abs().max().item())
        slope = (direction @ gradient).item()
        while True:
            _assign(parameters, x + size * direction)
            new_value, new_gradient = _evaluate(objective, parameters)
            if new_value is not None and new_value >= value + 1e-4 * size * slope:
                break
            size *= _shrink(size * slope, None if new_value is None else new_value - value)
            if size * direction.abs().max() < _SHORTEST:
                _assign(parameters, x)
                return
        s, y = size * direction, gradient - new_gradient
        if s @ y > 1e-10 * y @ y:
            pairs = [*pairs, (s, y)][-_MEMORY:]
        gain, x, value, gradient = new_value - value, x + s, new_value, new_gradient
        yield Step(value, gradient.norm().item())
        if gain <= tolerance**2 * (1 + abs(value)):
            return


def _shrink(expected: float, gained: float | None) -> float:
    """Return the factor to the top of the parabola through what was expected and gained, a half if nothing is known."""
    if gained is None:
        return 0.5
    return min(0.5, max(0.02, expected / (2 * (expected - gained))))


def _direction(gradient: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Multiply the gradient by the inverse of the negative Hessian that the pairs suggest (Nocedal 1980)."""
    q, memory = gradient.clone(), []
    for s, y in reversed(pairs):
        a = (s @ q) / (s @ y)
        q -= a * y
        memory.append((a, s, y))
    if pairs:
        s, y = pairs[-1]
        q *= (s @ y) / (y @ y)
    for a, s, y in reversed(memory):
        q += (a - (y @ q) / (s @ y)) * s
    return q


def _evaluate(objective: Callable[[], Tensor], parameters: list[nn.Parameter]) -> tuple[float | None, Tensor]:
    nothing = torch.zeros(0)
    try:
        with torch.enable_grad():
            value = objective()
        parts = torch.autograd.grad(value, parameters, allow_unused=True)
    except torch.linalg.LinAlgError:
        return None, nothing
    pairs = zip(parts, parameters, strict=True)
    gradient = torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in pairs])
    if not (torch.isfinite(value) and torch.isfinite(gradient).all()):
        return None, nothing
    return value.item(), gradient


def _flat(parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])


def _assign(parameters: list[nn.Parameter], x: Tensor) -> None:
    with torch.no_grad():
        for parameter, part in zip(parameters, x.split([p.numel() for p in parameters]), strict=True):
            parameter.copy_(part.view(parameter.shape))
