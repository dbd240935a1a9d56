"""Sparse matrices with their transposes, as maps that autograd, forward mode and vmap can all see through."""

import warnings
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

__all__ = ["Sparse", "sparse_product"]


@dataclass(frozen=True)
class Sparse:
    """M of shape (m, n) in compressed rows, and Mᵀ in compressed rows: both products read memory in order."""

    rows: Tensor  # where each row of M begins, (m + 1,)
    columns: Tensor  # (entries,)
    values: Tensor  # (entries,)
    mT: "Sparse | None" = None  # noqa: N815

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n)."""
        if self.mT is None:
            raise ValueError("a matrix without its transpose does not know its columns")
        return len(self.rows) - 1, len(self.mT.rows) - 1

    @classmethod
    def from_entries(cls, i: Tensor, j: Tensor, values: Tensor, m: int, n: int) -> Self:
        """Return the matrix with these entries, none of which may be there twice in a row."""
        straight, turned = _compressed(i, j, values, m), _compressed(j, i, values, n)
        return cls(*straight, mT=Sparse(*turned))

    def transposed(self) -> "Sparse":
        """Return Mᵀ, which shares its memory with M."""
        if self.mT is None:
            raise ValueError("this is a transpose already")
        return Sparse(self.mT.rows, self.mT.columns, self.mT.values, Sparse(self.rows, self.columns, self.values))

    def times(self, x: Tensor) -> Tensor:  # (..., n) -> (..., m)
        """Return M x, row by row."""
        m, n = self.shape
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            M = torch.sparse_csr_tensor(self.rows, self.columns, self.values, (m, n), check_invariants=False)
        flat = x.reshape(-1, n)
        out = M @ flat[0] if len(flat) == 1 else (M @ flat.mT.contiguous()).mT
        return out.reshape(*x.shape[:-1], m)


def _compressed(i: Tensor, j: Tensor, values: Tensor, m: int) -> tuple[Tensor, Tensor, Tensor]:
    order = torch.argsort(i, stable=True)
    begins = torch.zeros(m + 1, dtype=torch.int32)
    begins[1:] = torch.bincount(i, minlength=m).cumsum(0)
    return begins, j[order].int(), values[order]


def sparse_product(M: Sparse, x: Tensor) -> Tensor:  # (..., n) -> (..., m)
    """Return M x, differentiable in x as often and in whatever mode one likes."""
    return _Product.apply(x, M)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, M: Sparse) -> Tensor:
        return M.times(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Sparse], output: Tensor) -> None:
        ctx.M = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return sparse_product(ctx.M.transposed(), g), None

    @staticmethod
    def jvp(ctx: Any, x: Tensor, _: None) -> Tensor:
        return sparse_product(ctx.M, x)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], x: Tensor, M: Sparse) -> tuple[Tensor, int]:
        return sparse_product(M, x if in_dims[0] is None else x.movedim(in_dims[0], 0)), 0
