"""What columns of M give to parameters: squares, or products, of their gradients, example by example."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear

from ntkgp.curvature.squares import RULES
from ntkgp.curvature.tape import Call

__all__ = ["ParameterSums"]

_BYTES = 256 << 20  # of gradients that are held at a time


class ParameterSums:
    """Diagonals, or diagonal blocks, of Jᵀ Λ J by parameter.

    Args:
        blocks: whether all products of gradients are wanted, not only their squares.
        tied: parameters that are used more than once: their gradients wait for each other before they are squared.
    """

    def __init__(self, blocks: bool, tied: frozenset[str]) -> None:
        self.blocks, self.tied = blocks, tied
        self._sums: dict[str, Tensor] = {}
        self._waiting: dict[tuple[str, int], Tensor] = {}  # by parameter and origin, (N, k, p)

    def add(self, name: str, part: Tensor) -> None:  # (p,) or (p, p)
        """Add what is known of a parameter."""
        self._sums[name] = self._sums[name] + part if name in self._sums else part

    def add_columns(self, call: Call, origin: int, V: Tensor) -> None:  # (k, N, *)
        """Add what the columns V of M, at the output of an operation, give to its parameters."""
        again = self.tied & set(call.parameters.values())
        if call.kind is linear and V.ndim == 3 and not again and not self.blocks:
            squares = RULES[linear](call, V.square().sum(0), list(call.parameters))  # a weight meets one output only
            for key, part in squares.items():
                self.add(call.parameters[key], part.flatten())
            return
        waiting: dict[str, list[Tensor]] = {name: [] for name in again}
        for gradients in _by_example(call, V):
            for name, g in gradients.items():
                if name in again:
                    waiting[name].append(g)
                else:
                    self.add(name, self._squared(g))
        for name, parts in waiting.items():
            g, use = torch.cat(parts), (name, origin)
            self._waiting[use] = self._waiting[use] + g if use in self._waiting else g

    def total(self, name: str, parameter: Tensor) -> Tensor:  # (p,) or (p, p)
        """Return the sum, zeros if the network does not use the parameter."""
        p = parameter.numel()
        total = self._sums.get(name, parameter.new_zeros((p, p) if self.blocks else (p,)))
        for (other, _), g in self._waiting.items():
            if other == name:
                total = total + self._squared(g)
        return total

    def _squared(self, g: Tensor) -> Tensor:  # (n, k, p)
        if not self.blocks:
            return g.square().sum((0, 1))
        g = g.flatten(0, 1)
        return g.mT @ g


def _by_example(call: Call, V: Tensor) -> Iterator[dict[str, Tensor]]:  # {name: (n, k, p)}
    """Yield Jᵀ V for a few examples at a time."""
    keys = list(call.parameters)
    each = V.element_size() * len(V) * sum(call.given[key].numel() for key in keys)
    for some in torch.arange(V.shape[1]).split(max(1, _BYTES // max(1, each))):
        found = [call.pull(V[:, n : n + 1], keys, call.of_example(n), columns=True) for n in some.tolist()]
        yield {call.parameters[key]: torch.stack([g[key].reshape(len(V), -1) for g in found]) for key in keys}
