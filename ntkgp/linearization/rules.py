"""One rule for each kind of operation in which a parameter meets data.

A rule gets the autograd node, which argument the parameter is, the cotangents of the node's output and where the
examples lie, and returns the Jacobian of that argument as a :class:`~ntkgp.linearization.factors.Factor`.
`RULES` maps node names to rules; what is not in the table goes to the fallback, one example at a time.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ntkgp.linearization.factors import Dense, Factor, Outer
from ntkgp.linearization.graph import Node, Use
from ntkgp.linearization.memory import contiguous

__all__ = ["CONVOLUTION", "RULES", "NoRule", "Rule", "RuleFailed", "apply_rule", "windows"]

CONVOLUTION = "ConvolutionBackward0"
Rule = Callable[[Node, Use, Tensor], Factor]  # G: (N, C, T, *rest), rest the output's shape without its batch axis


class NoRule(Exception):
    """The operation is known, but not in this form."""


class RuleFailed(Exception):
    """A rule could not read a node; ``use`` says which."""

    def __init__(self, use: Use) -> None:
        super().__init__(f"no rule for {use}")
        self.use = use


def apply_rule(node: Node, use: Use, G: Tensor) -> Factor:
    """Return the Jacobian of the used tensor.

    Raises:
        RuleFailed: if the node is not in the table or not of a form its rule knows, whatever the reason: what a node
            saves differs between versions of torch, and the fallback can always take over.
    """
    try:
        return RULES[node.name()](node, use, G)
    except (NoRule, LookupError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise RuleFailed(use) from error


# Matrix products


def _addmm(node: Node, use: Use, G: Tensor) -> Factor:
    """β b + α x W."""
    if use.slot == 0:
        if len(use.target.shape) != 1 or use.axis.dim != 0:
            raise NoRule
        return Outer(_scaled(G, node._saved_beta), None, 1)
    x = node._saved_mat1 if use.slot == 2 else node._saved_mat2
    return _product(x, use.slot == 2, use, _scaled(G, node._saved_alpha))


def _mm(node: Node, use: Use, G: Tensor) -> Factor:
    """X W, or W x with the examples in the columns."""
    return _product(node._saved_self if use.slot == 1 else node._saved_mat2, use.slot == 1, use, G)


def _product(x: Tensor, right: bool, use: Use, G: Tensor) -> Factor:
    """The weight of x W (``right``), a (d_in, d_out) matrix, or of W x, a (d_out, d_in) one."""
    if use.axis.dim != (0 if right else 1):
        raise NoRule
    A = use.axis.examples_first(x)  # (N, T, d_in)
    return Outer(G, A, A.shape[-1], transposed=right ^ use.target.transposed)


def _bmm(node: Node, use: Use, G: Tensor) -> Factor:
    """A stack of x W, one weight each, as einsum writes it."""
    if use.axis.dim != 1 or use.slot != 1 or use.target.transposed:
        raise NoRule
    A = use.axis.examples_first(node._saved_self)  # (N, T, b, d_in), and G is (N, C, T, b, d_out)
    return Dense(torch.einsum("ntbi,nctbo->ncbio", A, G).flatten(2))


def _scaled(G: Tensor, factor: float) -> Tensor:
    return G if factor == 1 else G * factor


# Convolutions of any dimension, plain, strided, dilated, grouped and transposed


def _convolution(node: Node, use: Use, G: Tensor) -> Factor:  # G: (N, C, T, out, *spatial)
    """Spatial positions are positions like any other: the kernel meets a window of the input at each."""
    if use.axis.dim != 0:
        raise NoRule
    if use.slot == 2:
        return Outer(_positions(G, lead=2), None, 1)
    x = use.axis.examples_first(node._saved_input)  # (N, T, in, *spatial)
    window = (node._saved_weight.shape[2:], node._saved_stride, node._saved_padding, node._saved_dilation)
    groups = node._saved_groups
    if node._saved_transposed:  # the other way round: each input position meets a window of the output
        A, g = _positions(x, lead=1), windows(G, 2, *window, x.shape[3:])
        if groups == 1:
            return Outer(g, A, A.shape[-1], transposed=True)
        return Dense(_by_group("ntgi,nctgo->ncgio", A, g, groups))
    A, g = windows(x, 1, *window, G.shape[4:]), _positions(G, lead=2)
    if groups == 1:
        return Outer(g, A, A.shape[-1])
    return Dense(_by_group("ntgi,nctgo->ncgoi", A, g, groups))


def _positions(x: Tensor, lead: int) -> Tensor:  # (*lead, T, channels, *spatial) -> (*lead, T', channels)
    return x.flatten(lead + 2).mT.flatten(lead, lead + 1)


def windows(
    x: Tensor,
    lead: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    counts: Sequence[int],
) -> Tensor:  # (*lead, T, channels, *spatial) -> (*lead, T', channels * kernel)
    """Cut out, position by position, what a kernel sees of x.

    It lies in memory with the positions last: rows of the image are copied as a whole, not k numbers at a time.
    """
    x = pad(x, [size for p in reversed(padding) for size in (p, p)])
    for i, (k, s, d, count) in enumerate(zip(kernel, stride, dilation, counts, strict=True)):
        dim = lead + 2 + i
        x = x.unfold(dim, d * (k - 1) + 1, s)[..., ::d].narrow(dim, 0, count)
    spatial = len(kernel)  # x: (*lead, T, channels, *counts, *kernel)
    order = [lead + 1, *range(lead + 2 + spatial, x.ndim), lead, *range(lead + 2, lead + 2 + spatial)]
    x = x.permute(*range(lead), *order)  # (*lead, channels, *kernel, T, *counts)
    return contiguous(x).flatten(lead, lead + spatial).flatten(lead + 1).mT


def _by_group(equation: str, A: Tensor, G: Tensor, groups: int) -> Tensor:  # -> (N, C, p)
    return torch.einsum(equation, A.unflatten(-1, (groups, -1)), G.unflatten(-1, (groups, -1))).flatten(2)


# Elementwise operations: the parameter is broadcast against the output

_CACHED = 1 << 18  # numbers


def _elementwise(derivative: Callable[[Node, int], Tensor | float], channelwise: bool = False) -> Rule:
    """Make the rule of an operation with an elementwise derivative; ``channelwise`` parameters lie along dim 1."""

    def rule(node: Node, use: Use, G: Tensor) -> Factor:
        shape, axis = node._input_metadata[0].shape, use.axis
        aligned = [1] * (len(shape) - len(use.target.shape)) + list(use.target.shape)
        if channelwise:
            aligned = [1, *use.target.shape] + [1] * (len(shape) - 2)
        if use.target.transposed or aligned.pop(axis.dim) != 1:
            raise NoRule
        summed = [2] + [3 + i for i, size in enumerate(aligned) if size == 1]
        d = derivative(node, use.slot)
        if isinstance(d, Tensor):
            d = axis.examples_first(d.expand(shape)).unsqueeze(1)
            # A few outputs at a time: their product stays in the caches, that of all would go through memory.
            step = max(1, _CACHED // d.numel())
            G = torch.cat([(g * d).sum(summed) for g in G.split(step, dim=1)], dim=1)
        else:
            G = (G if d == 1 else G * d).sum(summed)
        return Dense(G.reshape(*G.shape[:2], -1))

    return rule


def _layer_norm(node: Node, slot: int) -> Tensor | float:
    if slot != 1:
        return 1.0
    x, mean, rstd = node._saved_input, node._saved_result1, node._saved_result2
    if x.requires_grad:  # what the node saved does not know how it depends on x; ε is not among it, but follows
        dims = tuple(range(-len(node._saved_normalized_shape), 0))
        var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        rstd = (var + (rstd**-2 - var).detach()).rsqrt()
    return (x - mean) * rstd


def _group_norm(node: Node, slot: int) -> Tensor | float:
    if slot != 1:
        return 1.0
    x = node._saved_input
    grouped = x.reshape(node._saved_N, node._saved_group, -1)
    return ((grouped - node._saved_result1.unsqueeze(-1)) * node._saved_result2.unsqueeze(-1)).view(x.shape)


def _batch_norm(node: Node, slot: int) -> Tensor | float:
    if node._saved_training:
        raise NoRule
    if slot != 1:
        return 1.0
    x = node._saved_input
    shape = [1, -1] + [1] * (x.ndim - 2)
    scale = (node._saved_running_var + node._saved_eps).rsqrt()
    return (x - node._saved_running_mean.view(shape)) * scale.view(shape)


def _divided(node: Node, slot: int) -> Tensor | float:
    return 1 / node._saved_other if slot == 0 else -node._saved_self / node._saved_other**2


# Look-ups


def _embedding(node: Node, use: Use, G: Tensor) -> Factor:  # G: (N, C, T, *positions, d)
    if node._saved_scale_grad_by_freq or use.axis.dim == G.ndim - 3:
        raise NoRule
    index = use.axis.examples_first(node._saved_indices).flatten(1)  # (N, T')
    G = G.flatten(2, -2)
    if node._saved_padding_idx >= 0:  # its row never learns
        G = G * (index != node._saved_padding_idx)[:, None, :, None]
    return Outer(G, index, use.target.shape[0], transposed=True)


RULES: dict[str, Rule] = {
    "AddmmBackward0": _addmm,
    "MmBackward0": _mm,
    "BmmBackward0": _bmm,
    CONVOLUTION: _convolution,
    "EmbeddingBackward0": _embedding,
    "AddBackward0": _elementwise(lambda node, slot: node._saved_alpha if slot == 1 else 1.0),
    "SubBackward0": _elementwise(lambda node, slot: -node._saved_alpha if slot == 1 else 1.0),
    "MulBackward0": _elementwise(lambda node, slot: node._saved_other if slot == 0 else node._saved_self),
    "DivBackward0": _elementwise(_divided),
    "ExpandBackward0": _elementwise(lambda node, slot: 1.0),
    "PreluKernelBackward0": _elementwise(lambda node, slot: node._saved_self.clamp(max=0)),
    "NativeLayerNormBackward0": _elementwise(_layer_norm),
    "NativeGroupNormBackward0": _elementwise(_group_norm, channelwise=True),
    "NativeBatchNormBackward0": _elementwise(_batch_norm, channelwise=True),
}
