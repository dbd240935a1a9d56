"""Learn how a network computes from a handful of examples, and check that the layer rules tell the truth.

Two forward passes at different numbers of examples show which tensors carry the examples and where. Two backward
passes, the second with example n scaled by n + 1, show which entries belong to which example. At last the rules'
Jᵀu is compared with autograd's, parameter by parameter: what differs is handed to the fallback, and what even the
fallback cannot explain is an error that names the parameters.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd import grad
from torch.utils.flop_counter import FlopCounterMode

from ntkgp.linearization.capture import Analysis, capture, fallback_jacobian
from ntkgp.linearization.factors import Outer
from ntkgp.linearization.features import Features
from ntkgp.linearization.graph import UNKNOWN, BatchAxis, Trace, Use, batch_axes, find_uses, trace
from ntkgp.linearization.inputs import Input, batch_size, leaves, map_leaves, take
from ntkgp.linearization.normalized import normalized_by
from ntkgp.linearization.rules import RULES, RuleFailed
from ntkgp.linearization.snapshot import Snapshot

__all__ = ["probe", "tolerance"]

_LARGE, _SMALL = 7, 5  # coprime: (N, T) and (T, N) orders then look alike only when T leaves remainder 1 by 35
_PROJECTIONS = 2  # random combinations of outputs that stand for all of them


def tolerance(dtype: torch.dtype) -> float:
    """Relative difference that rounding may cause between two ways to compute the same product."""
    return 1e-8 if dtype == torch.float64 else 2e-3


def probe(net: Snapshot, x: Input, large: int = _LARGE, small: int = _SMALL) -> Analysis:
    """Return what the graph that ``net`` makes of examples like ``x`` looks like.

    Raises:
        ValueError: if the network is random, mixes examples, or has parameters whose Jacobian cannot be accounted for.
    """
    index = torch.arange(large, device=leaves(x)[0].device) % batch_size(x)
    x, x_small = (
        map_leaves(lambda leaf: leaf.detach()[part].requires_grad_(leaf.requires_grad), x)  # noqa: B023
        for part in (index, index[:small])
    )
    generator = torch.Generator(device="cpu").manual_seed(0)
    with net.differentiable(), torch.enable_grad():
        f, f_small = _evaluated(net, x), _evaluated(net, x_small)
        _check_examples(net, x, f, f_small, large)
        t, t_small = trace(f, leaves(x)), trace(f_small, leaves(x_small))
        names = {id(parameter): name for name, parameter in net.parameters.items()}
        uses: list[Use] = []
        fallback, norms = set(net.layout.names), {}
        if t.structure == t_small.structure:
            axes = batch_axes(t, t_small, large, small)
            uses = find_uses(t, axes, names)
            norms = normalized_by(t, uses, set(axes))
            uses = _ordered(uses, (t, f, large), (t_small, f_small, small), generator)
            fallback = {
                name
                for use in uses
                if not use.axis.known or t.names[use.node] not in RULES
                for name in use.target.parameters
            }
        sizes = {node: t.shape((node, 0)).numel() // large for node in range(len(t.nodes))}
        analysis = Analysis(
            t.structure,
            tuple(uses),
            tuple(sorted(fallback)),
            f.shape[1],
            sum(sizes[node] for node in {use.node for use in uses}),
            sum(sizes.values()),
            _flops(net, x) / large,
            norms,
            forward_mode=not any(getattr(node, "_saved_padding_idx", -1) >= 0 for node in t.nodes),
        )
        return _audited(net, x, f, t, analysis, generator)


def _flops(net: Snapshot, x: Input) -> float:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(x)
    return counter.get_total_flops()


def _evaluated(net: Snapshot, x: Input) -> Tensor:  # (N, C)
    try:
        return net(x)
    except AssertionError as error:
        if "Guard failed" not in str(error):
            raise
        raise ValueError(
            f"the network was exported for other shapes than {batch_size(x)} examples ({error}): pass dynamic_shapes "
            "to torch.export.export, with Dim.DYNAMIC for the first dimension"
        ) from error


def _check_examples(net: Snapshot, x: Input, f: Tensor, f_small: Tensor, large: int) -> None:
    if f.shape[0] != large:
        raise ValueError(
            f"the network returned {f.shape[0]} rows for {large} examples: the first dimension of its output must "
            "hold the examples"
        )
    if not torch.isfinite(f).all():
        raise ValueError("the network's output holds NaN or infinity for the given input")
    scale = tolerance(f.dtype) * f.detach().abs().max().clamp_min(1e-12)
    again = net(x)
    if (again - f).abs().max() > scale:
        raise ValueError(
            "the network is random in eval mode (dropout or sampling that ignores eval()? exported in training mode?)"
        )
    if (f[: f_small.shape[0]] - f_small).abs().max() > scale:
        raise ValueError(
            "the network mixes examples of a batch: an output changes with the other examples beside it "
            "(a BatchNorm without running statistics? exported in training mode?)"
        )


def _ordered(
    uses: list[Use], large: tuple[Trace, Tensor, int], small: tuple[Trace, Tensor, int], generator: torch.Generator
) -> list[Use]:
    """Find the order of examples and positions where they share a dimension, if it can be found."""
    open_nodes = sorted({use.node for use in uses if use.axis.positions > 1})
    if not open_nodes:
        return uses
    owners = [_owners(*side, open_nodes, uses, generator) for side in (large, small)]
    axis_of: dict[int, BatchAxis] = {}
    for node in open_nodes:
        axis = next(use.axis for use in uses if use.node == node)
        T = axis.positions
        orders = [BatchAxis(axis.dim, T // after, after) for after in range(1, T + 1) if T % after == 0]
        fits = [
            order
            for order in orders
            if all(
                bool((owner[node][0] == _expected(order, n))[owner[node][1]].all()) and bool(owner[node][1].any())
                for owner, n in zip(owners, (large[2], small[2]), strict=True)
            )
        ]
        axis_of[node] = fits[0] if len(fits) == 1 else UNKNOWN
    return [replace(use, axis=axis_of.get(use.node, use.axis)) for use in uses]


def _expected(axis: BatchAxis, n: int) -> Tensor:
    return torch.arange(n).repeat_interleave(axis.after).repeat(axis.before)


def _owners(
    t: Trace, f: Tensor, n: int, nodes: Iterable[int], uses: list[Use], generator: torch.Generator
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return for every entry along the batch axis which example its cotangent belongs to, and whether it has one."""
    u = _randn(f.shape, generator, f)
    scale = torch.arange(1, n + 1, dtype=f.dtype, device=f.device).unsqueeze(1)
    edges = [t.gradient_edge(node) for node in nodes]
    plain, scaled = (grad(f, edges, seed, retain_graph=True, allow_unused=True) for seed in (u, scale * u))
    owners = {}
    for node, g, s in zip(nodes, plain, scaled, strict=True):
        dim = next(use.axis.dim for use in uses if use.node == node)
        size = t.shape((node, 0))[dim]
        if g is None:
            owners[node] = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.bool)
            continue
        norm, scaled_norm = (v.movedim(dim, 0).flatten(1).norm(dim=1) for v in (g, s))
        known = norm > 1e-6 * norm.max()
        ratio = torch.where(known, scaled_norm / norm.where(known, torch.ones_like(norm)), 1)
        owners[node] = (ratio.round().long() - 1).cpu(), (known & (norm > 0)).cpu()
    return owners


def _audited(net: Snapshot, x: Input, f: Tensor, t: Trace, analysis: Analysis, generator: torch.Generator) -> Analysis:
    """Compare Jᵀu by the rules with autograd's; move what differs to the fallback, and audit that too."""
    seeds = _randn((_PROJECTIONS, f.shape[1]), generator, f)
    u = _randn((f.shape[0], _PROJECTIONS), generator, f)
    parameters = list(net.parameters.values())
    parts = grad(f, parameters, u @ seeds, retain_graph=True, allow_unused=True)
    truth = {
        name: torch.zeros_like(parameter) if part is None else part
        for (name, parameter), part in zip(net.parameters.items(), parts, strict=True)
    }
    while True:
        try:
            factors = capture(net, f, t, analysis, seeds)
            found = Features.assemble(len(f), len(seeds), factors).vjp(u[None])
            break
        except RuleFailed as failure:
            analysis = replace(analysis, fallback=tuple(sorted({*analysis.fallback, *failure.use.target.parameters})))
    outers = [factor for uses in factors.values() for _, factor in uses if isinstance(factor, Outer)]
    windows = sum(outer.A.numel() for outer in outers if outer.A is not None) // len(f)
    ruled = [name for name in net.layout.names if name not in analysis.fallback]
    analysis = replace(
        analysis, fallback=tuple(sorted({*analysis.fallback, *_differing(ruled, found, truth)})), windows=windows
    )
    unexplained = _differing(analysis.fallback, _fallback_vjp(net, x, analysis.fallback, seeds, u), truth)
    if unexplained:
        raise ValueError(
            f"the Jacobian of {unexplained} could not be accounted for: gradients of single examples do not add up to "
            "those of the batch"
        )
    return analysis


def _differing(names: Iterable[str], found: dict[str, Tensor], truth: dict[str, Tensor]) -> list[str]:
    total = torch.stack([part.norm() for part in truth.values()]).norm()
    differing = []
    for name in names:
        expected = truth[name].flatten()
        error = (found[name].flatten() - expected).norm() if name in found else expected.norm()
        bound = tolerance(expected.dtype) * (expected.norm() + 1e-3 * total)
        if not error <= bound:
            differing.append(name)
    return differing


def _fallback_vjp(net: Snapshot, x: Input, names: Iterable[str], seeds: Tensor, u: Tensor) -> dict[str, Tensor]:
    names = list(names)
    if not names:
        return {}
    parameters = [net.parameters[name] for name in names]
    J = torch.cat([fallback_jacobian(net(take(x, slice(n, n + 1))), parameters, seeds) for n in range(batch_size(x))])
    pulled = torch.einsum("nc,ncp->p", u, J).split([p.numel() for p in parameters])
    return dict(zip(names, pulled, strict=True))


def _randn(shape: Iterable[int], generator: torch.Generator, like: Tensor) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=like.dtype).to(like.device)
