"""J as a lazy matrix."""

from collections.abc import Iterable
from itertools import product

import torch
from linear_operator import LinearOperator
from torch import Tensor

from ntkgp.linearization import Linearization
from ntkgp.operators.rows import RowForm
from ntkgp.operators.sliced import LazySlices

__all__ = ["JacobianLinearOperator", "batched_jvp", "batched_vjp", "in_dtype_of"]


class JacobianLinearOperator(LazySlices):
    """J(x), (*batch, N C, P): products are one forward-mode pass, those with Jᵀ one backward pass.

    Args:
        rows: the inputs, one tensor (*batch, N, D) for each tensor the network takes.
        lin: the linearised network.
        form: how rows become inputs.
    """

    def __init__(self, *rows: Tensor, lin: Linearization, form: RowForm) -> None:
        lin = in_dtype_of(lin, rows)
        super().__init__(*rows, lin=lin, form=form)
        self.rows, self.lin, self.form = rows, lin, form

    def _matmul(self, rhs: Tensor) -> Tensor:  # (*batch, P, S)
        if rhs.ndim == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        return batched_jvp(self.lin, self.rows, self.form, rhs)

    def _t_matmul(self, rhs: Tensor) -> Tensor:  # (*batch, N C, S)
        if rhs.ndim == 1:
            return self._t_matmul(rhs.unsqueeze(-1)).squeeze(-1)
        return batched_vjp(self.lin, self.rows, self.form, rhs)

    def _size(self) -> torch.Size:
        *batch, n, _ = self.rows[0].shape
        return torch.Size([*batch, n * self.lin.num_outputs, self.lin.num_params])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the network."""
        return self.lin.dtype

    def _transpose_nonbatch(self) -> LinearOperator:
        return _Transposed(*self.rows, lin=self.lin, form=self.form)


class _Transposed(JacobianLinearOperator):
    """Jᵀ."""

    def _matmul(self, rhs: Tensor) -> Tensor:
        return super()._t_matmul(rhs)

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return super()._matmul(rhs)

    def _size(self) -> torch.Size:
        *batch, rows, columns = super()._size()
        return torch.Size([*batch, columns, rows])

    def _transpose_nonbatch(self) -> LinearOperator:
        return JacobianLinearOperator(*self.rows, lin=self.lin, form=self.form)


def in_dtype_of(lin: Linearization, tensors: Iterable[Tensor]) -> Linearization:
    """Return ``lin`` in the dtype of the first floating tensor: a converted operator converts its network too."""
    dtype = next((t.dtype for t in tensors if t.dtype.is_floating_point), lin.dtype)
    return lin.to(dtype)


def batched_jvp(lin: Linearization, rows: tuple[Tensor, ...], form: RowForm, V: Tensor) -> Tensor:
    """Return J V for every batch of rows, (*batch, N, D), and of V, (*batch2, P, S) -> (*batch3, N C, S)."""
    return _each_batch(lambda x, v: lin.jvp(x, v.mT).flatten(1).mT, rows, form, V)


def batched_vjp(lin: Linearization, rows: tuple[Tensor, ...], form: RowForm, U: Tensor) -> Tensor:
    """Return Jᵀ U for every batch of rows, (*batch, N, D), and of U, (*batch2, N C, S) -> (*batch3, P, S)."""

    def product(x, u):  # noqa: ANN001, ANN202
        return lin.vjp(x, u.mT.unflatten(-1, (-1, lin.num_outputs))).mT

    return _each_batch(product, rows, form, U)


def _each_batch(function, rows, form, rhs):  # noqa: ANN001, ANN202
    batch = torch.broadcast_shapes(rows[0].shape[:-2], rhs.shape[:-2])
    rows = tuple(row.expand(*batch, *row.shape[-2:]) for row in rows)
    rhs = rhs.expand(*batch, *rhs.shape[-2:])
    if not batch:
        return function(form.unflatten(rows), rhs)
    parts = [
        function(form.unflatten(tuple(row[index] for row in rows)), rhs[index])
        for index in product(*(range(size) for size in batch))
    ]
    return torch.stack(parts).unflatten(0, batch)
