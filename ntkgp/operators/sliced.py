"""Some rows and columns of a lazy matrix."""

import torch
from linear_operator import LinearOperator
from linear_operator.utils.getitem import _is_noop_index, _noop_index
from torch import Tensor

__all__ = ["LazySlices", "SlicedLinearOperator"]


class SlicedLinearOperator(LinearOperator):
    """B[r][:, c] for a lazy B: products scatter into B's columns and gather from its rows.

    Args:
        base: B, (*batch, M, N).
        row_index: r, (m,), the same for all batches.
        col_index: c, (n,).
    """

    def __init__(self, base: LinearOperator, *, row_index: Tensor, col_index: Tensor) -> None:
        super().__init__(base, row_index=row_index, col_index=col_index)
        self.base, self.row_index, self.col_index = base, row_index, col_index

    def _size(self) -> torch.Size:
        return torch.Size([*self.base.batch_shape, len(self.row_index), len(self.col_index)])

    def _transpose_nonbatch(self) -> LinearOperator:
        return SlicedLinearOperator(self.base._transpose_nonbatch(), row_index=self.col_index, col_index=self.row_index)

    def _matmul(self, rhs: Tensor) -> Tensor:  # (*batch, n, S) or (n,)
        if rhs.ndim == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        return self.base._matmul(_scatter(rhs, self.col_index, self.base.shape[-1])).index_select(-2, self.row_index)

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        left, right = (v.unsqueeze(-1) if v.ndim == 1 else v for v in (left_vecs, right_vecs))
        left = _scatter(left, self.row_index, self.base.shape[-2])
        right = _scatter(right, self.col_index, self.base.shape[-1])
        return *self.base._bilinear_derivative(left, right), None, None

    def to_dense(self) -> Tensor:  # (*batch, m, n)
        """Return the selected entries."""
        return self.base.to_dense().index_select(-2, self.row_index).index_select(-1, self.col_index)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        return self.base._get_indices(self.row_index[row_index], self.col_index[col_index], *batch_indices)

    def _getitem(
        self, row_index: slice | Tensor, col_index: slice | Tensor, *batch_indices: slice | Tensor
    ) -> LinearOperator:
        if any(isinstance(index, Tensor) and index.ndim != 1 for index in (row_index, col_index)):
            return super()._getitem(row_index, col_index, *batch_indices)
        base = self.base._getitem(_noop_index, _noop_index, *batch_indices) if batch_indices else self.base
        return SlicedLinearOperator(base, row_index=self.row_index[row_index], col_index=self.col_index[col_index])

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return self.__class__(self.base._permute_batch(*dims), **self._kwargs)

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self.__class__(self.base._unsqueeze_batch(dim), **self._kwargs)


class LazySlices(LinearOperator):
    """A lazy matrix whose slices are lazy matrices too."""

    def _getitem(
        self, row_index: slice | Tensor, col_index: slice | Tensor, *batch_indices: slice | Tensor
    ) -> LinearOperator:
        whole = _is_noop_index(row_index) and _is_noop_index(col_index)
        tensors = any(isinstance(index, Tensor) for index in (row_index, col_index))
        if whole or (tensors and not all(_is_noop_index(index) for index in batch_indices)):
            return super()._getitem(row_index, col_index, *batch_indices)  # indices that vary together
        base = super()._getitem(_noop_index, _noop_index, *batch_indices)
        rows, cols = (torch.arange(size, device=self.device) for size in self.shape[-2:])
        return SlicedLinearOperator(base, row_index=rows[row_index], col_index=cols[col_index])

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        """Return single entries from one product for each different column."""
        columns, position = torch.unique(col_index, return_inverse=True)
        unit = torch.zeros(self.shape[-1], len(columns), dtype=self.dtype, device=self.device)
        unit[columns, torch.arange(len(columns), device=self.device)] = 1
        return (self @ unit)[(*batch_indices, row_index, position)]


def _scatter(v: Tensor, index: Tensor, size: int) -> Tensor:  # (*batch, n, S) -> (*batch, size, S)
    return v.new_zeros(*v.shape[:-2], size, v.shape[-1]).index_add(-2, index, v)
