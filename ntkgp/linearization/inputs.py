"""Inputs of a network: one tensor, or a tuple or mapping of tensors, the examples along the first dimension."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = [
    "Input",
    "batch_size",
    "leaves",
    "map_leaves",
    "rebuild",
    "same_input",
    "take",
    "validate_input",
    "wants_grad",
]

Input = Tensor | tuple[Tensor, ...] | list[Tensor] | Mapping[str, Tensor]


def leaves(x: Input) -> list[Tensor]:
    """Return the tensors of ``x`` in a fixed order."""
    if isinstance(x, Tensor):
        return [x]
    return list(x.values()) if isinstance(x, Mapping) else list(x)


def map_leaves(fn: Callable[[Tensor], Tensor], x: Input) -> Input:
    """Apply ``fn`` to every tensor of ``x`` and keep the structure; of a mapping a plain dict is left."""
    if isinstance(x, Tensor):
        return fn(x)
    if isinstance(x, Mapping):
        return {key: fn(value) for key, value in x.items()}
    return tuple(fn(value) for value in x)


def rebuild(x: Input, *parts: Tensor) -> Input:
    """Return an input with the structure of ``x`` and the tensors ``parts``."""
    remaining = iter(parts)
    return map_leaves(lambda _: next(remaining), x)


def batch_size(x: Input) -> int:
    """Return N, the number of examples in ``x``."""
    return leaves(x)[0].shape[0]


def take(x: Input, index: slice | Tensor) -> Input:
    """Return the examples of ``x`` that ``index`` selects."""
    return map_leaves(lambda leaf: leaf[index], x)


def wants_grad(x: Input) -> bool:
    """Tell whether derivatives in ``x`` are asked for."""
    return torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves(x))


def same_input(x: Input, y: Input) -> bool:
    """Tell whether ``x`` and ``y`` hold the same numbers, bit for bit; O(N D), no differentiation."""
    a, b = leaves(x), leaves(y)
    if len(a) != len(b):
        return False
    pairs = list(zip(a, b, strict=True))
    return all(u is v for u, v in pairs) or all(
        u.shape == v.shape and u.dtype == v.dtype and u.device == v.device and torch.equal(u, v) for u, v in pairs
    )


def validate_input(x: Input, dtype: torch.dtype, device: torch.device, argument: str = "x") -> None:
    """Check that ``x`` can be fed to a network of this dtype and device.

    Raises:
        TypeError: if ``x`` is not made of tensors, or its floating dtype is not the network's.
        ValueError: if ``x`` is empty, ragged, on another device, or holds NaN or infinity.
    """
    if not isinstance(x, Tensor | tuple | list | Mapping) or not all(isinstance(leaf, Tensor) for leaf in leaves(x)):
        raise TypeError(f"{argument} must be a tensor, or a tuple or dict of tensors, but is a {type(x).__name__}")
    parts = leaves(x)
    if not parts or any(leaf.ndim == 0 for leaf in parts):
        raise ValueError(f"{argument} must hold at least one tensor with the examples along its first dimension")
    if len({leaf.shape[0] for leaf in parts}) > 1:
        raise ValueError(
            f"the tensors of {argument} must agree on the number of examples, "
            f"but have {[leaf.shape[0] for leaf in parts]}"
        )
    if parts[0].shape[0] == 0:
        raise ValueError(f"{argument} is empty: it has shape {tuple(parts[0].shape)}, at least one example is expected")
    for leaf in parts:
        if leaf.device != device:
            raise ValueError(f"{argument} is on {leaf.device}, but the network is on {device}: move one of them")
        if leaf.is_floating_point() and leaf.dtype != dtype:
            raise TypeError(
                f"{argument} has dtype {leaf.dtype}, but the network has {dtype}: "
                "convert the input, or the linearization with lin.to(dtype)"
            )
        if leaf.is_floating_point() and not _is_finite(leaf):
            raise ValueError(f"{argument} holds NaN or infinity")


def _is_finite(leaf: Tensor) -> bool:
    """Look at the sum first: one pass, where a test of every number makes four. If it overflows, numbers decide."""
    return bool(leaf.sum().isfinite() or leaf.isfinite().all())
