"""Inputs as rows: GPyTorch and LinearOperator see (..., N, D); the network sees its own shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ntkgp.linearization.inputs import Input, leaves

__all__ = ["RowForm"]


@dataclass(frozen=True)
class RowForm:
    """How rows become an input: the shape of one example in each tensor, and the keys of a dict or None."""

    shapes: tuple[torch.Size, ...]
    keys: tuple[str, ...] | None = None
    is_tuple: bool = False

    @classmethod
    def of(cls, x: Input) -> "RowForm":
        """Return the form of ``x``, examples along the first dimension."""
        keys = tuple(x) if isinstance(x, Mapping) else None
        return cls(tuple(leaf.shape[1:] for leaf in leaves(x)), keys, isinstance(x, tuple | list))

    def flatten(self, x: Input) -> tuple[Tensor, ...]:  # each (N, *shape) -> (N, D)
        """Return the tensors of ``x`` with one row for each example."""
        return tuple(leaf.reshape(leaf.shape[0], -1) for leaf in leaves(x))

    def unflatten(self, rows: tuple[Tensor, ...]) -> Input:  # each (..., N, D) -> (... N, *shape)
        """Return the input these rows stand for; leading batch dimensions are merged into the examples."""
        parts = [row.reshape(prod(row.shape[:-1]), *shape) for row, shape in zip(rows, self.shapes, strict=True)]
        if self.keys is not None:
            return dict(zip(self.keys, parts, strict=True))
        return tuple(parts) if self.is_tuple else parts[0]
