"""How P numbers are the parameters: names, shapes, and where each lies in a flat vector."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

__all__ = ["ParameterLayout"]


@dataclass(frozen=True)
class ParameterLayout:
    """The Bayesian parameters in order; a vector in R^P is their concatenation."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def sizes(self) -> list[int]:
        """Numbers in each parameter."""
        return [prod(shape) for shape in self.shapes]

    @property
    def num_params(self) -> int:
        """P, the length of the flat vector."""
        return sum(self.sizes)

    @property
    def slices(self) -> dict[str, slice]:
        """Where each parameter lies in the flat vector."""
        ends = list(accumulate(self.sizes))
        return {name: slice(end - size, end) for name, size, end in zip(self.names, self.sizes, ends, strict=True)}

    def split(self, v: Tensor) -> dict[str, Tensor]:  # (..., P) -> {name: (..., *shape)}
        """Cut flat vectors into named tensors (views)."""
        parts = v.split(self.sizes, dim=-1)
        return {
            name: part.reshape(v.shape[:-1] + shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def join(self, parts: Mapping[str, Tensor], batch_dims: int = 0) -> Tensor:  # {name: (..., *shape)} -> (..., P)
        """Concatenate named tensors, each with ``batch_dims`` leading dimensions, into flat vectors."""
        return torch.cat([parts[name].reshape(*parts[name].shape[:batch_dims], -1) for name in self.names], dim=-1)
