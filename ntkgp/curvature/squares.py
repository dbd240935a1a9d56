r"""One rule for each kind of operation: (J ∘ J)ᵀ m, the diagonal of Jᵀ diag(m) J.

A rule gets an operation z of tensors, m of the shape of z, and which tensors are wanted. For each of these it returns
:math:`\sum_o (\partial z_o / \partial t_i)^2 m_o`, of the shape of t: for data that stays with the example, for a
parameter the examples add up. `RULES` is the table; a layer, function or method of ``Tensor`` of your own joins it with
one of the rules here or with a function of the same form:

.. code-block:: python

    ntkgp.curvature.RULES[MyActivation] = ntkgp.curvature.elementwise

(Miani et al. 2022, Appendix E, have those of linear layers, convolutions and activations.)
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ntkgp.curvature.tape import Call, Key, Kind

__all__ = ["RULES", "Rule", "bilinear", "by_jacobian", "elementwise", "routed"]

Rule = Callable[[Call, Tensor, Sequence[Key]], dict[Key, Tensor]]


def routed(call: Call, m: Tensor, wanted: Sequence[Key]) -> dict[Key, Tensor]:
    """The rule of operations that move, choose or add up: every entry of J is 0 or 1, its own square."""
    return call.pull(m, wanted)


def elementwise(call: Call, m: Tensor, wanted: Sequence[Key]) -> dict[Key, Tensor]:
    """The rule of operations in which every output sees one entry of each tensor, broadcast or not: m σ'²."""
    spread = {key: call.given[key].detach().expand(m.shape).clone().requires_grad_() for key in wanted}
    with torch.enable_grad():
        z = call.run(spread)
    slopes = torch.autograd.grad(z, list(spread.values()), torch.ones_like(z))
    return {
        key: (m * slope.square()).sum_to_size(call.given[key].shape) for key, slope in zip(spread, slopes, strict=True)
    }


def bilinear(call: Call, m: Tensor, wanted: Sequence[Key]) -> dict[Key, Tensor]:
    """The rule of linear layers, convolutions and matrix products: the same operation with the other factor squared.

    An entry of either factor meets an output through one entry of the other: (W ∘ W)ᵀ m for a linear layer's input, a
    transposed convolution with squared kernels for a convolution's. A bias has ones for its derivatives.
    """
    a, b = call.key(0, "input"), call.key(1, "weight") or call.key(1, "other")
    found: dict[Key, Tensor] = {}
    for key in wanted:
        other = {a: b, b: a}.get(key)
        if other is key:
            raise ValueError(f"{call} multiplies a tensor by itself, and has no rule")
        found |= call.pull(m, [key], None if other is None else {other: call.given[other].square()})
    return found


def by_jacobian(call: Call, m: Tensor, wanted: Sequence[Key]) -> dict[Key, Tensor]:
    """The rule of anything, by the Jacobian of each example: for small layers, as it is quadratic in their size."""
    found: dict[Key, list[Tensor]] = {key: [] for key in wanted}
    for n, here in enumerate(m):
        basis = torch.eye(here.numel(), dtype=m.dtype, device=m.device).view(-1, 1, *here.shape)
        for key, J in call.pull(basis, wanted, call.of_example(n), columns=True).items():
            found[key].append(torch.tensordot(here.flatten(), J.square(), 1))
    return {key: torch.cat(each) if key in call.data else torch.stack(each).sum(0) for key, each in found.items()}


# Means: an output is the same multiple w of each of its inputs, so that J ∘ J is diag(w) J


def _mean(call: Call, m: Tensor, wanted: Sequence[Key]) -> dict[Key, Tensor]:
    (key,) = wanted
    return call.pull(m * (m.numel() / call.given[key].numel()), wanted)


def _average_pool(call: Call, m: Tensor, wanted: Sequence[Key]) -> dict[Key, Tensor]:
    (key,) = wanted
    ones = torch.ones_like(call.given[key][:1])
    args, kwargs = call.values
    told = dict(zip(("kernel_size", "stride", "padding", "ceil_mode"), args[1:], strict=False)) | kwargs
    told = {
        name: told[name] for name in ("kernel_size", "stride", "padding", "ceil_mode") if told.get(name) is not None
    }
    if m.ndim == 3:  # only in two dimensions and more torch counts for us
        flat: dict[str, Any] = {
            name: v if name == "ceil_mode" else (int(name != "padding"), *_tuple(v)) for name, v in told.items()
        }
        count = F.avg_pool2d(ones.unsqueeze(-2), **flat, divisor_override=1).squeeze(-2)
    else:
        count = (F.avg_pool2d if m.ndim == 4 else F.avg_pool3d)(ones, **told, divisor_override=1)
    return call.pull(m * call.run({key: ones}) / count, wanted)


def _tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _adaptive_pool(call: Call, m: Tensor, wanted: Sequence[Key]) -> dict[Key, Tensor]:
    (key,) = wanted
    x = call.given[key]
    for dim in range(2, m.ndim):
        n, size = x.shape[dim], m.shape[dim]
        i = torch.arange(size, device=m.device)
        count = -(-(i + 1) * n // size) - i * n // size  # from floor(i n / size) to ceil((i + 1) n / size)
        m = m / count.to(m).view(-1, *[1] * (m.ndim - dim - 1))
    return call.pull(m, wanted)


# Interpolation: one dimension after the other, each output between two neighbours


def _interpolate(call: Call, m: Tensor, wanted: Sequence[Key]) -> dict[Key, Tensor]:
    mode = call.value(3, "mode", "nearest")
    if mode in ("nearest", "nearest-exact"):
        return routed(call, m, wanted)
    if mode not in ("linear", "bilinear", "trilinear") or call.value(6, "antialias", False):
        raise ValueError(f"{call} has no rule for mode {mode!r}{' with antialiasing' * (mode[-3:] == 'ear')}")
    (key,) = wanted
    x = call.given[key]
    for dim in range(2, x.ndim):
        n = x.shape[dim]
        ramp = torch.arange(n, dtype=torch.float64, device=m.device).view(
            [-1 if d == dim else 1 for d in range(x.ndim)]
        )
        at = call.run({key: ramp.expand(1, 1, *x.shape[2:])})  # where each output lies between the inputs
        at = at.movedim(dim, -1).flatten(0, -2)[0].clamp(0, n - 1)
        low = at.floor().long()
        share = (at - low).to(m)
        new = torch.zeros(*m.shape[:dim], n, *m.shape[dim + 1 :], dtype=m.dtype, device=m.device)
        shape = [-1 if d == dim else 1 for d in range(m.ndim)]
        new.index_add_(dim, low, m * (1 - share).square().view(shape))
        m = new.index_add_(dim, (low + 1).clamp(max=n - 1), m * share.square().view(shape))
    return {key: m}


# Norms


def _normalised(x: Tensor, m: Tensor, eps: float, centred: bool = True) -> tuple[Tensor, Tensor]:  # (..., n), (..., n)
    r"""Return (x − μ)/s and, for its Jacobian (I − 11ᵀ/n − x̂ x̂ᵀ/n)/s, the diagonal of Jᵀ diag(m) J, in linear time."""
    n = x.shape[-1]
    x = x - x.mean(-1, keepdim=True) if centred else x
    s = (x.square().mean(-1, keepdim=True) + eps).sqrt()
    x = x / s
    S0, S1, S2 = (t.sum(-1, keepdim=True) for t in (m, m * x, m * x.square()))
    lost = x.square() + centred
    spread = S2 * x.square() + centred * (S0 + 2 * S1 * x)
    pulled = (m * (1 - 2 * lost / n) + spread / n**2) / s.square()
    return x, pulled.clamp(min=0)  # a sum of squares, but for rounding


def _norm(groups: Callable[[Call, Tensor], tuple[Sequence[int], Sequence[int]]], centred: bool = True) -> Rule:
    """Make the rule of a norm; ``groups`` says the shape (..., n) of what is normalised, and that of its weights."""

    def rule(call: Call, m: Tensor, wanted: Sequence[Key]) -> dict[Key, Tensor]:
        key = call.key(0, "input")
        assert key is not None
        x = call.given[key]
        weight = call.key(2, "weight")
        grouped, aligned = groups(call, x)
        eps = call.value(4 if centred else 3, "eps")
        eps = (1e-5 if centred else torch.finfo(x.dtype).eps) if eps is None else eps
        scaled = m if weight is None else m * call.given[weight].view(aligned).square()
        x_hat, pulled = _normalised(x.reshape(grouped), scaled.reshape(grouped), eps, centred)
        found: dict[Key, Tensor] = {key: pulled.view(x.shape)}
        if weight is not None:
            found[weight] = (m * x_hat.view(x.shape).square()).sum_to_size(aligned)
        bias = call.key(3, "bias") if centred else None
        if bias is not None:
            found[bias] = m.sum_to_size(aligned)
        return {k: found[k].reshape(call.given[k].shape) for k in wanted}

    return rule


def _trailing(call: Call, x: Tensor) -> tuple[list[int], list[int]]:
    shape = list(call.value(1, "normalized_shape"))
    return [*x.shape[: x.ndim - len(shape)], -1], [*[1] * (x.ndim - len(shape)), *shape]


def _channels(call: Call, x: Tensor) -> tuple[list[int], list[int]]:
    return [len(x), call.value(1, "num_groups"), -1], _along_channels(x.shape[1], x.ndim)


def _along_channels(size: int, ndim: int) -> list[int]:
    return [1, size, *[1] * (ndim - 2)]


def _batch_norm(call: Call, m: Tensor, wanted: Sequence[Key]) -> dict[Key, Tensor]:
    """A layer in evaluation mode: every channel has a fixed scale."""
    layer = call.layer
    assert isinstance(layer, nn.modules.batchnorm._BatchNorm)
    if layer.running_mean is None or layer.running_var is None:
        raise ValueError(f"{call} has no running statistics, so that examples meet, and no rule")
    (key,) = call.data
    x, aligned = call.given[key], _along_channels(m.shape[1], m.ndim)
    s = (layer.running_var + layer.eps).sqrt()
    scale = s.reciprocal() if not layer.affine else call.given["weight"] / s
    found: dict[Key, Tensor] = {
        key: m * scale.square().view(aligned),
        "weight": (m * ((x - layer.running_mean.view(aligned)) / s.view(aligned)).square()).sum_to_size(aligned),
        "bias": m.sum_to_size(aligned),
    }
    return {k: found[k].reshape(call.given[k].shape) for k in wanted}


def _prelu(call: Call, m: Tensor, wanted: Sequence[Key]) -> dict[Key, Tensor]:
    x, weight = call.key(0, "input"), call.key(1, "weight")
    assert x is not None
    assert weight is not None
    t, w = call.given[x], call.given[weight]
    w = w.view(_along_channels(w.numel(), m.ndim))
    found: dict[Key, Tensor] = {
        x: m * torch.where(t < 0, w.square(), 1.0),
        weight: (m * t.clamp(max=0).square()).sum_to_size(w.shape),
    }
    return {key: found[key].reshape(call.given[key].shape) for key in wanted}


def _dropout(call: Call, m: Tensor, wanted: Sequence[Key]) -> dict[Key, Tensor]:
    if call.value(2, "training", True):
        raise ValueError(f"{call} is random, also in evaluation mode, and has no rule")
    return routed(call, m, wanted)


_ELEMENTWISE = (
    "relu relu6 leaky_relu elu selu celu gelu silu mish softplus softsign tanh sigmoid hardtanh hardsigmoid hardswish "
    "logsigmoid tanhshrink softshrink hardshrink threshold _threshold exp expm1 log log1p sin cos erf sqrt rsqrt "
    "square abs neg pow clamp reciprocal add sub mul div truediv"
)
_ROUTED = (
    "flatten reshape view unflatten permute transpose movedim squeeze unsqueeze contiguous clone cat concat stack pad "
    "narrow select getitem expand repeat sum pixel_shuffle pixel_unshuffle channel_shuffle max_pool1d max_pool2d "
    "max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"
)
_BILINEAR = "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d matmul mm bmm"
_OWNERS = (F, torch, Tensor, operator)


def _table() -> dict[Kind, Rule]:
    kinds: dict[Rule, str] = {elementwise: _ELEMENTWISE, routed: _ROUTED, bilinear: _BILINEAR}
    kinds |= {_dropout: "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout", _mean: "mean"}
    kinds |= {_average_pool: "avg_pool1d avg_pool2d avg_pool3d", _interpolate: "interpolate", _prelu: "prelu"}
    kinds |= {_adaptive_pool: "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"}
    kinds |= {_norm(_trailing): "layer_norm", _norm(_channels): "group_norm", _norm(_trailing, False): "rms_norm"}
    found: dict[Kind, Rule] = {}
    for rule, names in kinds.items():
        for name in names.split():
            found |= {getattr(owner, name): rule for owner in _OWNERS if hasattr(owner, name)}
    found |= dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm)
    return found


RULES: dict[Kind, Rule] = _table()
