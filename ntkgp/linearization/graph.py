"""Where parameters meet data: the autograd graph of one forward pass, read as a list of uses.

After a forward pass autograd already holds what a layerwise Jacobian needs: every operation's saved inputs, and the
edge at which its output cotangent can be asked for. Modules, functional calls, fused attention, unrolled recurrences
and tied weights all become the same few node types there, so nothing is hooked and nothing is patched.

A node whose output shape changes with the number of examples is *data*; everything else is a parameter or *derived*
from parameters alone. An edge from a data node to a parameter or derived node is a *use*.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["UNKNOWN", "BatchAxis", "Edge", "Node", "Target", "Trace", "Use", "batch_axes", "find_uses", "trace"]

_INPUT = "input"
_LEAF = "torch::autograd::AccumulateGrad"
_TRANSPOSES = ("TBackward0", "TransposeBackward0", "NumpyTBackward0")  # of matrices
Node = Any  # an autograd node: what it saves depends on its operation
Edge = tuple[int, int]  # (index of the node, which of its outputs)


@dataclass(frozen=True)
class Trace:
    """The nodes below an output in depth-first order, and the edges between them by index."""

    nodes: list[Node]
    edges: list[tuple[Edge | None, ...]]
    names: list[str]

    @property
    def structure(self) -> tuple:
        """What two traces share when they come from the same computation at different numbers of examples."""
        return tuple(self.names), tuple(self.edges)

    def shape(self, edge: Edge) -> torch.Size:
        """Shape of the tensor that ``edge`` stands for."""
        node, output = edge
        return torch.Size(self.nodes[node]._input_metadata[output].shape)

    def gradient_edge(self, node: int) -> GradientEdge:
        """Where autograd accumulates the cotangent of the first output of ``node``."""
        return GradientEdge(self.nodes[node], 0)


def trace(f: Tensor, inputs: Iterable[Tensor] = ()) -> Trace:
    """Walk the autograd graph below ``f``, down to parameters and to ``inputs``, whatever these were made from."""
    ends = {get_gradient_edge(x).node for x in inputs if x.requires_grad}
    index: dict[Node, int] = {}
    nodes: list[Node] = []
    stack = [f.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in index:
            continue
        index[node] = len(nodes)
        nodes.append(node)
        if node not in ends:
            stack.extend(child for child, _ in reversed(node.next_functions))
    edges = [
        ()
        if node in ends
        else tuple(None if child is None else (index[child], output) for child, output in node.next_functions)
        for node in nodes
    ]
    return Trace(nodes, edges, [_INPUT if node in ends else node.name() for node in nodes])


@dataclass(frozen=True)
class BatchAxis:
    """Which dimension holds the examples: its entries are ordered (before, N, after)."""

    dim: int
    before: int = 1
    after: int = 1

    @property
    def known(self) -> bool:
        """Whether the examples have been found at all."""
        return self.dim >= 0

    @property
    def positions(self) -> int:
        """T, the number of entries each example owns along the dimension."""
        return self.before * self.after

    def examples_first(self, t: Tensor) -> Tensor:  # (..., before N after, ...) -> (N, T, ...)
        """Move the examples to the front and what shared their dimension behind them."""
        t = t.movedim(self.dim, 0).unflatten(0, (self.before, -1, self.after))
        return t.transpose(0, 1).flatten(1, 2)


UNKNOWN = BatchAxis(-1)


def batch_axes(large: Trace, small: Trace, n_large: int, n_small: int) -> dict[Edge, BatchAxis]:
    """Return for every data edge its batch axis, unknown where no single axis explains how the shape grows.

    Entries along the axis are taken as (N, T): whether that order is right only a probe can tell.
    """
    axes: dict[Edge, BatchAxis] = {}
    for node in range(len(large.nodes)):
        for output in range(len(large.nodes[node]._input_metadata)):
            a, b = large.shape((node, output)), small.shape((node, output))
            if a == b:
                continue
            changed = [dim for dim, (p, q) in enumerate(zip(a, b, strict=False)) if p != q]
            single = len(a) == len(b) and len(changed) == 1
            if single and a[changed[0]] % n_large == 0 and a[changed[0]] * n_small == b[changed[0]] * n_large:
                axes[node, output] = BatchAxis(changed[0], after=a[changed[0]] // n_large)
            else:
                axes[node, output] = UNKNOWN
    return axes


@dataclass(frozen=True)
class Target:
    """What is used: a parameter, perhaps transposed, or a tensor derived from several."""

    parameters: tuple[str, ...]
    shape: torch.Size
    derived: Edge | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Use:
    """Argument ``slot`` of the operation ``node`` is ``target``, and its output carries the examples."""

    operation: str
    node: int
    slot: int
    target: Target
    axis: BatchAxis


def find_uses(t: Trace, axes: dict[Edge, BatchAxis], names: dict[int, str]) -> list[Use]:
    """List every use; ``names`` maps the id of a parameter to its name."""
    uses = []
    for node, children in enumerate(t.edges):
        outputs = [(node, output) for output in range(len(t.nodes[node]._input_metadata))]
        if not any(edge in axes for edge in outputs):
            continue
        for slot, child in enumerate(children):
            if child is not None and child not in axes:
                target = _target(t, child, names)
                if target is not None:
                    uses.append(Use(t.names[node], node, slot, target, axes.get((node, 0), UNKNOWN)))
    return uses


def _target(t: Trace, edge: Edge, names: dict[int, str]) -> Target | None:
    node, transposed = edge[0], False
    while t.names[node] in _TRANSPOSES and len(t.shape((node, 0))) == 2:
        (below, _), *_ = (edge for edge in t.edges[node] if edge is not None)
        node, transposed = below, not transposed
    parameters = _leaves_below(t, node, names)
    if not parameters:
        return None
    if t.names[node] == _LEAF:
        return Target(parameters, t.shape(edge), None, transposed)
    return Target(parameters, t.shape(edge), edge)


def _leaves_below(t: Trace, node: int, names: dict[int, str]) -> tuple[str, ...]:
    seen, stack, found = set(), [node], []
    while stack:
        i = stack.pop()
        if i in seen:
            continue
        seen.add(i)
        if t.names[i] == _LEAF and id(t.nodes[i].variable) in names:
            found.append(names[id(t.nodes[i].variable)])
        stack.extend(edge[0] for edge in t.edges[i] if edge is not None)
    return tuple(sorted(found))
