"""From one forward pass and C backward passes to the factored Jacobian."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd import grad
from torch.autograd.graph import GradientEdge

from ntkgp.linearization.factors import Dense, Factor
from ntkgp.linearization.graph import Trace, Use
from ntkgp.linearization.memory import empty
from ntkgp.linearization.rules import RuleFailed, apply_rule
from ntkgp.linearization.snapshot import Snapshot

__all__ = ["Analysis", "Workspace", "capture", "fallback_jacobian"]

Workspace = dict[int, Tensor]  # cotangents by node


@dataclass(frozen=True)
class Analysis:
    """What was learnt about a computation: its uses, the parameters that need the fallback, and its size."""

    structure: tuple
    uses: tuple[Use, ...]
    fallback: tuple[str, ...]
    num_outputs: int
    cotangents: int  # numbers per example in the outputs of all used operations
    activations: int  # numbers per example in the whole graph
    flops: float = 0.0  # of a forward pass, per example
    norms: dict[str, int] = field(default_factory=dict)  # for scale-invariant parameters, the norm that makes them so
    windows: int = 0  # numbers per example in the inputs that weights meet, position by position
    forward_mode: bool = True  # not for embeddings with padding: only reverse mode keeps their row from learning

    def covered(self) -> list[Use]:
        """Uses whose parameters all have rules."""
        return [use for use in self.uses if not set(use.target.parameters) & set(self.fallback)]


def capture(
    net: Snapshot,
    f: Tensor,
    trace: Trace,
    analysis: Analysis,
    seeds: Tensor,
    differentiable: bool = False,
    work: Workspace | None = None,
) -> dict[str, list[tuple[int, Factor]]]:
    r"""Return, for each parameter that rules cover, the node and the factor of each of its uses.

    One backward pass for each row of ``seeds`` gives the cotangents of all uses at once: examples do not mix, so the
    cotangents of all N come from a single pass over the sum of their outputs.

    Args:
        net: the network.
        f: its output with the graph still alive, (N, outputs).
        trace: the graph of ``f``.
        analysis: what is known about this graph.
        seeds: what to differentiate, (C, outputs): the identity for J itself; or other combinations of outputs for
            each example, (C, N, outputs).
        differentiable: keep the features differentiable in the inputs.
        work: where to keep cotangents from one batch to the next; they are overwritten, so features must be copied.
    """
    uses = analysis.covered()
    C, n = seeds.shape[0], f.shape[0]
    inner = sorted({use.node for use in uses if not _is_output(use, trace, f)})
    axes = {use.node: use.axis for use in uses}
    edges = [trace.gradient_edge(node) for node in inner]
    G: dict[int, Tensor] = {}
    columns: dict[int, list[Tensor]] = {node: [] for node in inner}
    for c in range(C if inner else 0):
        cotangents = grad(
            f, edges, seeds[c].expand_as(f), retain_graph=True, create_graph=differentiable, allow_unused=True
        )
        for node, g in zip(inner, cotangents, strict=True):
            g = f.new_zeros(trace.shape((node, 0))) if g is None else g
            g = axes[node].examples_first(g)
            if differentiable:
                columns[node].append(g)
            else:
                if c == 0:
                    G[node] = _room(work, node, (n, C, *g.shape[1:]), g)
                G[node][:, c] = g
    if differentiable:
        G = {node: torch.stack(parts, 1) for node, parts in columns.items()}
    factors: dict[str, list[tuple[int, Factor]]] = {name: [] for name in net.layout.names}
    with torch.set_grad_enabled(differentiable):
        for use in uses:
            output = use.node not in G
            shared = output and seeds.ndim == 2
            g = _as_cotangents(seeds) if output else G[use.node]
            factor = apply_rule(trace.nodes[use.node], use, g)
            factor = factor if differentiable else factor.detach()  # what autograd saved would keep its graph alive
            if isinstance(factor, Dense):
                factor = Dense(factor.J.expand(n, -1, -1))
            elif shared:
                factor = replace(factor, shared=True)
            for name, part in _pull_back(net, trace, use, factor, differentiable):
                factors[name].append((use.node, part))
    return {name: parts for name, parts in factors.items() if parts}


def _as_cotangents(seeds: Tensor) -> Tensor:  # (N or 1, C, 1, outputs)
    by_example = seeds.unsqueeze(1) if seeds.ndim == 2 else seeds
    return by_example.transpose(0, 1).unsqueeze(2)


def _room(work: Workspace | None, node: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
    if work is None:
        return empty(shape, like)
    if node not in work or work[node].shape[0] < shape[0]:
        work[node] = empty(shape, like)
    return work[node][: shape[0]]


def _is_output(use: Use, trace: Trace, f: Tensor) -> bool:
    """The operation makes the output itself, so its cotangents are the seeds."""
    return trace.nodes[use.node] is f.grad_fn and use.axis.dim == 0 and use.axis.positions == 1


def _pull_back(net: Snapshot, trace: Trace, use: Use, factor: Factor, differentiable: bool) -> list[tuple[str, Factor]]:
    """Turn the Jacobian of what was used into those of the parameters behind it: J_θ = J_u ∂u/∂θ."""
    target = use.target
    if target.derived is None:
        return [(target.parameters[0], factor)]
    J = factor.dense()
    node, output = target.derived
    try:
        pulled = grad(
            [GradientEdge(trace.nodes[node], output)],
            [net.parameters[name] for name in target.parameters],
            [J.reshape(-1, *target.shape)],
            retain_graph=True,
            create_graph=differentiable,
            is_grads_batched=True,
        )
    except RuntimeError as error:  # an operation that vmap does not know
        raise RuleFailed(use) from error
    return [(name, Dense(part.reshape(*J.shape[:2], -1))) for name, part in zip(target.parameters, pulled, strict=True)]


def fallback_jacobian(f: Tensor, parameters: Sequence[Tensor], seeds: Tensor, differentiable: bool = False) -> Tensor:
    """Return the dense Jacobian of one example, (1, C, p), of output (1, outputs), by plain backward passes."""
    rows = []
    for seed in seeds:
        parts = grad(
            f, parameters, seed.expand_as(f), retain_graph=True, create_graph=differentiable, allow_unused=True
        )
        rows.append(torch.cat([_dense(part, p).flatten() for part, p in zip(parts, parameters, strict=True)]))
    return torch.stack(rows).unsqueeze(0)


def _dense(part: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if part is None else part
