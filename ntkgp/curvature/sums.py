"""What columns of M give to parameters: squares, or products, of their gradients, example by example."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import conv1d, conv2d, conv3d, linear

from ntkgp.curvature.squares import RULES
from ntkgp.curvature.tape import Call, Key
from ntkgp.linearization.rules import windows

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
    pull = _convolution if _plain_convolution(call) else _one_by_one
    for some in torch.arange(V.shape[1]).split(max(1, _BYTES // max(1, each))):
        here = slice(int(some[0]), int(some[-1]) + 1)
        yield {call.parameters[key]: g for key, g in pull(call, V[:, here], here, keys).items()}


def _one_by_one(call: Call, V: Tensor, here: slice, keys: list[Key]) -> dict[Key, Tensor]:
    each = range(here.start, here.stop)
    found = [call.pull(V[:, i : i + 1], keys, call.of_example(n), columns=True) for i, n in enumerate(each)]
    return {key: torch.stack([g[key].reshape(len(V), -1) for g in found]) for key in keys}


def _plain_convolution(call: Call) -> bool:
    padded, groups = call.value(4, "padding", 0), call.value(6, "groups", 1)
    return call.kind in (conv1d, conv2d, conv3d) and not isinstance(padded, str) and groups == 1


def _convolution(call: Call, V: Tensor, here: slice, keys: list[Key]) -> dict[Key, Tensor]:  # (k, n, out, *spatial)
    """Gradients of a kernel: columns at each position times what the kernel sees there, one product an example."""
    x, weight = call.key(0, "input"), call.key(1, "weight")
    assert x is not None
    assert weight is not None
    kernel = call.given[weight].shape[2:]
    options = ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    stride, padding, dilation = (_each(call.value(*option), len(kernel)) for option in options)
    A = windows(call.given[x][here].unsqueeze(1), 1, kernel, stride, padding, dilation, V.shape[3:])  # (n, T, in)
    G = V.transpose(0, 1).flatten(3)  # (n, k, out, T)
    found = {weight: G.flatten(1, 2) @ A, call.key(2, "bias"): G.sum(-1)}
    return {key: found[key].reshape(len(G), len(V), -1) for key in keys}


def _each(value: int | Sequence[int], dims: int) -> Sequence[int]:
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims // len(value))
