r"""Batch normalisation by the statistics of the batch, quick to differentiate twice.

Channel by channel, over its M numbers, with r the inverse standard deviation and a bar for means over them,

.. math:: y = \gamma \hat x + \beta, \quad \hat x = r (x - \bar x), \qquad
   \nabla_x = \gamma r P g, \quad \nabla_\gamma = \textstyle\sum g \hat x, \quad \nabla_\beta = \sum g, \qquad
   P g = g - \bar g - \hat x \, \overline{g \hat x}

where g is the gradient in y. P is symmetric, and r P is also the transposed derivative of :math:`\hat x` in x. For
cotangents u, p, q of the three gradients, :math:`s = u^\top \nabla_x + p \nabla_\gamma + q \nabla_\beta` has

.. math:: \frac{ds}{dg} = \gamma r P u + p \hat x + q, \qquad \frac{ds}{d\gamma} = r A, \qquad
   \frac{ds}{dx} = r P h - \tfrac{\gamma r^2 A}{M} \hat x, \qquad A = u^\top P g, \quad
   h = (p - \gamma r \, \overline{u \hat x}) \, g - \gamma r \, \overline{g \hat x} \, u

so that ds/dx is g, u, :math:`\hat x` and 1, each times a number a channel. One of torch's own backward passes, one sum
and six passes in place serve where its second derivative takes forty passes, each with memory of its own.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

__all__ = ["batch_norm"]


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return what :func:`torch.nn.functional.batch_norm` returns in training, its running statistics moved as there."""
    return _BatchNorm.apply(x, weight, bias, running_mean, running_var, momentum, eps)


class _BatchNorm(Function):
    """y = γ x̂ + β."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        y, mean, r = torch.native_batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
        ctx.save_for_backward(x, weight, mean, r)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        in_x, in_weight, in_bias = _Gradient.apply(g, *ctx.saved_tensors, ctx.eps)
        return in_x, in_weight, in_bias if ctx.needs_input_grad[2] else None, None, None, None, None


class _Gradient(Function):
    """(g, x, γ) to the gradients in x, γ and β; mean and r are those of x, whose derivative counts them."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor, eps: float) -> tuple:
        in_x, in_weight, in_bias = _backward(g, x, weight, mean, r, eps)
        ctx.save_for_backward(g, x, weight, mean, r, in_weight, in_bias)
        ctx.eps = eps
        return in_x, in_weight, in_bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor, p: Tensor, q: Tensor) -> tuple:
        g, x, weight, mean, r, sum_gx, sum_g = ctx.saved_tensors
        M, gain = x.numel() // len(mean), weight * r
        by_g, sum_ux, sum_u = _backward(u, x, weight, mean, r, ctx.eps)  # γ r P u, Σ u x̂, Σ u
        mean_g, mean_gx, mean_u, mean_ux = sum_g / M, sum_gx / M, sum_u / M, sum_ux / M
        room = u * g
        A = room.sum([0, *range(2, x.ndim)]) - M * (mean_u * mean_g + mean_ux * mean_gx)
        centred = torch.sub(x, _channels(mean, x), out=room)  # x̂ / r
        by_g.addcmul_(centred, _channels(p * r, x)).add_(_channels(q, x))
        a, b = p - gain * mean_ux, -gain * mean_gx  # h = a g + b u
        along = a * mean_gx + b * mean_ux + gain * A / M
        by_x = centred.mul_(_channels(-along * r.square(), x))
        by_x.addcmul_(g, _channels(r * a, x)).addcmul_(u, _channels(r * b, x))
        by_x.sub_(_channels(r * (a * mean_g + b * mean_u), x))
        return by_g, by_x, r * A, None, None, None


def _backward(g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor, eps: float) -> tuple:
    """Return γ r P g, Σ g x̂ and Σ g."""
    return torch.ops.aten.native_batch_norm_backward(g, x, weight, None, None, mean, r, True, eps, [True] * 3)


def _channels(v: Tensor, like: Tensor) -> Tensor:  # (C,) -> (1, C, 1, ...)
    return v.view(1, -1, *[1] * (like.ndim - 2))
