"""J v and Jᵀ u without J: forward and reverse mode through the whole network."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad
from torch.autograd.function import once_differentiable
from torch.func import vmap

from ntkgp.linearization.capture import fallback_jacobian
from ntkgp.linearization.inputs import Input, batch_size, take
from ntkgp.linearization.probe import tolerance
from ntkgp.linearization.snapshot import Snapshot

__all__ = ["JVP", "JVPS", "JVPS_IN_REVERSE", "DifferentiableJVP", "first_consistent", "vjp"]

Product = tuple[Tensor, Tensor]  # f, (N, outputs), and J v, (S, N, outputs)


def vjp(net: Snapshot, x: Input, u: Tensor, differentiable: bool = False) -> Tensor:  # (S, N, outputs) -> (S, P)
    """Return Jᵀu for S cotangents: one forward pass, S backward passes through one graph."""
    parameters = list(net.parameters.values())
    with net.differentiable(), torch.enable_grad():
        f = net(x)
        rows = [
            grad(f, parameters, cotangent, retain_graph=True, create_graph=differentiable, materialize_grads=True)
            for cotangent in u
        ]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


def jvp_vmapped(net: Snapshot, x: Input, v: Tensor) -> Product:  # (S, P)
    """Compute J v for S tangents in one pass in forward mode: what does not depend on the tangent is computed once."""
    if len(v) == 1:
        return jvp_looped(net, x, v)
    return vmap(lambda tangent: _forward(net, x, tangent), out_dims=(None, 0))(v)  # type: ignore[arg-type]


def jvp_looped(net: Snapshot, x: Input, v: Tensor) -> Product:  # (S, P)
    """Compute J v in forward mode, one tangent after the other."""
    values, tangents = zip(*(_forward(net, x, tangent) for tangent in v), strict=True)
    return values[0], torch.stack(tangents)


def jvp_by_double_backward(net: Snapshot, x: Input, v: Tensor) -> Product:  # (S, P)
    """Compute J v as the derivative of the linear map u -> Jᵀu, for networks without a forward mode."""
    parameters = list(net.parameters.values())
    with net.differentiable(), torch.enable_grad():
        f = net(x)
        u = torch.zeros_like(f, requires_grad=True)
        pulled = grad(f, parameters, u, create_graph=True, materialize_grads=True)
        alive = [i for i, part in enumerate(pulled) if part.requires_grad]  # parameters the network does not use: zero
        rows: list[Tensor] = []
        for tangent in v:
            tangents = list(net.layout.split(tangent).values())
            rows += grad([pulled[i] for i in alive], u, [tangents[i] for i in alive], retain_graph=True)
    return f.detach(), torch.stack(rows)


def jvp_by_jacobian(net: Snapshot, x: Input, v: Tensor) -> Product:  # (S, P)
    """Compute J v from the Jacobians of single examples: slow, and always possible."""
    parameters = list(net.parameters.values())
    values, rows = [], []
    for n in range(batch_size(x)):
        with net.differentiable(), torch.enable_grad():
            f = net(take(x, slice(n, n + 1)))
            basis = torch.eye(f.shape[1], dtype=f.dtype, device=f.device)
            values.append(f.detach())
            rows.append(v @ fallback_jacobian(f, parameters, basis)[0].mT)
    return torch.cat(values), torch.stack(rows, dim=1)


def _forward(net: Snapshot, x: Input, v: Tensor) -> Product:  # (P,) -> (N, outputs) twice
    theta = {name: parameter.detach() for name, parameter in net.parameters.items()}
    with net.differentiable():
        return torch.func.jvp(lambda parameters: net(x, parameters), (theta,), (net.layout.split(v),))  # type: ignore[return-value]


JVPS_IN_REVERSE = (jvp_by_double_backward, jvp_by_jacobian)
JVPS = (jvp_vmapped, jvp_looped, *JVPS_IN_REVERSE)  # fastest first
JVP = Callable[[Snapshot, Input, Tensor], Product]


def first_consistent(ways: Sequence[JVP], net: Snapshot, x: Input) -> JVP:
    """Return the first way to compute J v that runs and satisfies ⟨u, J v⟩ = ⟨Jᵀu, v⟩ at ``x``.

    Raises:
        ValueError: if none does.
    """
    dtype, generator = net.dtype, torch.Generator().manual_seed(0)
    v = torch.randn(2, net.layout.num_params, generator=generator, dtype=dtype).to(net.device)
    with torch.no_grad():
        f = net(x)
    u = torch.randn(f.shape, generator=generator, dtype=dtype).to(net.device)
    pulled = vjp(net, x, u.unsqueeze(0))[0]
    truth, bound = v @ pulled, tolerance(dtype) * v.norm(dim=1) * pulled.norm()
    for way in ways:
        try:
            found = (way(net, x, v)[1] * u).sum((1, 2))
        except (RuntimeError, NotImplementedError):  # no forward mode or no batching rule for an operation
            continue
        if ((found - truth).abs() <= bound).all():
            return way
    raise ValueError("no way to compute J v agrees with Jᵀu: the network's derivatives are inconsistent")


class DifferentiableJVP(torch.autograd.Function):
    """J(x) v with derivatives in x and v by reverse mode only: d⟨u, J(x) v⟩ = d⟨J(x)ᵀu, v⟩.

    Differentiating a forward-mode product instead is silently wrong for some operations (layer norm among them).
    """

    @staticmethod
    def forward(
        ctx: Any, net: Snapshot, product: JVP, rebuild: Callable[..., Input], v: Tensor, *parts: Tensor
    ) -> Tensor:  # (S, P) -> (S, N, outputs)
        """Compute the product by ``product`` at the input that ``rebuild`` makes of its tensors."""
        ctx.net, ctx.rebuild = net, rebuild
        ctx.save_for_backward(v, *parts)
        return product(net, rebuild(*(part.detach() for part in parts)), v.detach())[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        """Pull u back to v and to the input."""
        v, *parts = ctx.saved_tensors
        wanted = [
            part.detach().requires_grad_(flag) for part, flag in zip(parts, ctx.needs_input_grad[4:], strict=True)
        ]
        with torch.enable_grad():
            pulled = vjp(ctx.net, ctx.rebuild(*wanted), u, differentiable=True)
            inputs = [part for part in wanted if part.requires_grad]
            grads = iter(grad((pulled * v).sum(), inputs, materialize_grads=True) if inputs else ())
        to_parts = [next(grads) if part.requires_grad else None for part in wanted]
        return None, None, None, pulled.detach(), *to_parts
