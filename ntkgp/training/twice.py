"""Operations that are quick to differentiate twice, where torch's own second derivatives take detours.

That of a convolution goes through huge kernels, those of softplus and batch normalisation through dozens of passes over
memory.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from ntkgp.training.batch_norm import batch_norm

__all__ = ["QuickSecondDerivatives"]


class Shape(NamedTuple):
    """What a convolution is told beside its tensors, in the order of ``aten::convolution``."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


class QuickSecondDerivatives(TorchFunctionMode):
    """Within this context some operations are differentiable twice, quickly, and not more often."""

    def __torch_function__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Take over convolutions with padding in numbers, softplus, and weighted batch normalisation in training."""
        if func in _ORDERS:
            told = dict(zip(_ORDERS[func], args, strict=False)) | dict(kwargs or {})
            if not isinstance(told.get("padding", 0), str):
                return _convolve(func in _TRANSPOSED, **told)
        if func is F.softplus:
            return _softplus(*args, **(kwargs or {}))
        if func is F.batch_norm:
            told = dict(zip(_BATCH_NORM, args, strict=False)) | dict(kwargs or {})
            if told.pop("training", False) and told.get("weight") is not None:
                return batch_norm(told.pop("input"), **told)
        return func(*args, **(kwargs or {}))


_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_ORDERS: dict[Callable, tuple[str, ...]] = {
    **dict.fromkeys(
        (F.conv1d, F.conv2d, F.conv3d), ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    ),
    **dict.fromkeys(
        _TRANSPOSED, ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
    ),
}
_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def _convolve(
    transposed: bool,
    input: Tensor,  # noqa: A002  (as torch names it)
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    output_padding: int | tuple[int, ...] = 0,
) -> Tensor:
    def each(value: int | tuple[int, ...]) -> tuple[int, ...]:
        value = (value,) if isinstance(value, int) else tuple(value)
        return value * (weight.ndim - 2) if len(value) == 1 else value

    shape = Shape(each(stride), each(padding), each(dilation), transposed, each(output_padding), groups)
    return _Convolution.apply(input, weight, bias, shape)


def _forward(x: Tensor, w: Tensor, b: Tensor | None, shape: Shape) -> Tensor:
    return torch.ops.aten.convolution(x, w, b, *shape)


def _backward(g: Tensor, x: Tensor, w: Tensor, shape: Shape, wanted: list[bool]) -> list[Tensor]:
    channels = w.shape[1] * shape.groups if shape.transposed else w.shape[0]
    return torch.ops.aten.convolution_backward(g, x, w, [channels], *shape, wanted)


class _Convolution(Function):
    """z = x * w + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, shape: Shape) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.shape = shape
        return _forward(x, w, b, shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return (*_Gradient.apply(g, *ctx.saved_tensors, ctx.shape, list(ctx.needs_input_grad[:3])), None)


class _Gradient(Function):
    """The gradients of a convolution in x, w and b: bilinear in (g, w), in (g, x), and linear in g."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, w: Tensor, shape: Shape, wanted: list[bool]) -> tuple:
        ctx.save_for_backward(g, x, w)
        ctx.shape = shape
        ctx.set_materialize_grads(False)
        return tuple(_backward(g, x, w, shape, wanted))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, in_x: Tensor | None, in_w: Tensor | None, in_b: Tensor | None) -> tuple:
        (g, x, w), shape = ctx.saved_tensors, ctx.shape
        by_g = by_x = by_w = None
        if in_x is not None:
            by_g = _forward(in_x, w, None, shape)
            if ctx.needs_input_grad[2]:
                by_w = _backward(g, in_x, w, shape, [False, True, False])[1]
        if in_w is not None:
            part = _forward(x, in_w, None, shape)
            by_g = part if by_g is None else by_g.add_(part)
            if ctx.needs_input_grad[1]:
                by_x = _backward(g, x, in_w, shape, [True, False, False])[0]
        if in_b is not None:
            part = in_b.view(1, -1, *[1] * (g.ndim - 2))
            by_g = part.expand_as(g) if by_g is None else by_g.add_(part)
        return by_g, by_x, by_w, None, None


def _softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:  # noqa: A002
    return _Softplus.apply(input, beta, threshold)


class _Softplus(Function):
    """log(1 + exp(β x)) / β, with slope s = σ(β x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, beta: float, threshold: float) -> Tensor:
        ctx.save_for_backward(x, torch.sigmoid(x if beta == 1 else beta * x))
        ctx.beta = beta
        return F.softplus(x, beta, threshold)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return _Slope.apply(g, *ctx.saved_tensors, ctx.beta), None, None


class _Slope(Function):
    """g s; s is that of x, whose derivative counts it."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, s: Tensor, beta: float) -> Tensor:
        ctx.save_for_backward(g, s)
        ctx.beta = beta
        return g * s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, in_g: Tensor) -> tuple:
        g, s = ctx.saved_tensors
        by_g = in_g * s
        by_x = torch.addcmul(by_g, by_g, s, value=-1).mul_(g)  # in_g s (1 − s) g
        return by_g, by_x if ctx.beta == 1 else ctx.beta * by_x, None, None
