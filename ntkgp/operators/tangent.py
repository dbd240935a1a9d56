"""K = J S₀ Jᵀ as a lazy matrix."""

from collections.abc import Callable
from itertools import product

import torch
from linear_operator import LinearOperator
from linear_operator.utils.getitem import _is_noop_index, _noop_index
from torch import Tensor

from ntkgp.linearization import Features, Linearization
from ntkgp.operators.dense import gram, point_blocks
from ntkgp.operators.jacobian import batched_jvp, batched_vjp, in_dtype_of
from ntkgp.operators.rows import RowForm
from ntkgp.operators.sliced import SlicedLinearOperator
from ntkgp.priors import PriorCovariance

__all__ = ["TangentKernelLinearOperator"]

Index = slice | Tensor


class TangentKernelLinearOperator(LinearOperator):
    r"""K(x, x') = J(x) S₀ J(x')ᵀ, (*batch, N C, M C), point-major.

    A product K v is one VJP and one JVP through the network; nothing of size N C x M C is formed. Slices stay lazy,
    and where they fall on whole points, keep only those points.

    Args:
        args: the rows of x, one tensor (*batch, N, D) for each tensor the network takes, those of x', and S₀.
        lin: the linearised network.
        form: how rows become inputs.
    """

    def __init__(self, *args: Tensor | PriorCovariance, lin: Linearization, form: RowForm) -> None:
        S0, rows = args[-1], [row for row in args[:-1] if isinstance(row, Tensor)]
        if not isinstance(S0, PriorCovariance):
            raise TypeError(f"the last argument must be a PriorCovariance, but is a {type(S0).__name__}")
        batch = torch.broadcast_shapes(*(row.shape[:-2] for row in rows), S0.batch_shape)
        rows = [row if row.shape[:-2] == batch else row.expand(*batch, *row.shape[-2:]) for row in rows]
        S0 = S0 if S0.batch_shape == batch else S0._expand_batch(batch)
        lin = in_dtype_of(lin, [S0])
        super().__init__(*rows, S0, lin=lin, form=form)
        k = len(form.shapes)
        self.rows1, self.rows2, self.S0 = tuple(rows[:k]), tuple(rows[k:]), S0
        self.lin, self.form = lin, form

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the network."""
        return self.lin.dtype

    def _size(self) -> torch.Size:
        *batch, n, _ = self.rows1[0].shape
        C = self.lin.num_outputs
        return torch.Size([*batch, n * C, self.rows2[0].shape[-2] * C])

    def _transpose_nonbatch(self) -> LinearOperator:
        return self._with(self.rows2, self.rows1)

    def _matmul(self, rhs: Tensor) -> Tensor:  # (*batch, M C, S) or (M C,)
        if rhs.ndim == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        pulled = batched_vjp(self.lin, self.rows2, self.form, rhs)
        return batched_jvp(self.lin, self.rows1, self.form, self.S0._matmul(pulled))

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiate Σ uᵀ K v = Σ ⟨J_1ᵀu, S₀ J_2ᵀv⟩: the network twice only where its inputs ask for it."""
        left, right = (v.unsqueeze(-1) if v.ndim == 1 else v for v in (left_vecs, right_vecs))
        with torch.no_grad():
            pulled1 = batched_vjp(self.lin, self.rows1, self.form, left)
            pulled2 = batched_vjp(self.lin, self.rows2, self.form, right)
            weighted1, weighted2 = self.S0._matmul(pulled1), self.S0._matmul(pulled2)
        return (
            *self._input_gradients(self.rows1, left, weighted2),
            *self._input_gradients(self.rows2, right, weighted1),
            *self.S0._bilinear_derivative(pulled1, pulled2),
        )

    def _input_gradients(self, rows: tuple[Tensor, ...], u: Tensor, w: Tensor) -> list[Tensor | None]:
        """Differentiate Σ ⟨J(x)ᵀ u, w⟩ in x."""
        if not any(row.requires_grad for row in rows):
            return [None] * len(rows)
        with torch.enable_grad():
            wanted = [row.detach().requires_grad_(row.requires_grad) for row in rows]
            loss = (batched_vjp(self.lin, tuple(wanted), self.form, u.detach()) * w).sum()
            grads = iter(
                torch.autograd.grad(loss, [row for row in wanted if row.requires_grad], materialize_grads=True)
            )
        return [next(grads) if row.requires_grad else None for row in wanted]

    def to_dense(self) -> Tensor:  # (*batch, N C, M C)
        """Return K from the features; differentiable in S₀, and in the inputs where they require gradients."""
        same = self._is_symmetric()
        return self._by_batch(lambda F1, F2, S: gram(F1, None if same else F2, S), same)

    def _diagonal(self) -> Tensor:  # (*batch, N C)
        same = self._is_symmetric()
        blocks = self._by_batch(lambda F1, F2, S: point_blocks(F1, None if same else F2, S), same)
        return blocks.diagonal(dim1=-2, dim2=-1).flatten(-2)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        """Return single entries from the blocks of the pairs of points they lie in."""
        C = self.lin.num_outputs
        shape = torch.broadcast_shapes(row_index.shape, col_index.shape, *(index.shape for index in batch_indices))
        row, col, *batch = (index.expand(shape).flatten() for index in (row_index, col_index, *batch_indices))
        rows1 = tuple(r[(*batch, row // C)] for r in self.rows1)
        rows2 = tuple(r[(*batch, col // C)] for r in self.rows2)
        if batch:  # S₀ may differ between entries: one batch of a single point each
            S0 = self.S0._getitem(_noop_index, _noop_index, *batch)
            pairs = TangentKernelLinearOperator(
                *(r.unsqueeze(-2) for r in (*rows1, *rows2)), S0, lin=self.lin, form=self.form
            ).to_dense()
        else:
            F1, F2 = (self.lin.features(self.form.unflatten(r)) for r in (rows1, rows2))
            pairs = point_blocks(F1, F2, self.S0.covariances)
        return pairs[torch.arange(len(row), device=row.device), row % C, col % C].view(shape)

    def _getitem(self, row_index: Index, col_index: Index, *batch_indices: Index) -> LinearOperator:
        batched = not all(_is_noop_index(index) for index in batch_indices)
        if batched and any(isinstance(index, Tensor) for index in (row_index, col_index)):
            return super()._getitem(row_index, col_index, *batch_indices)  # indices that vary together
        if batched:
            everything = super()._getitem(_noop_index, _noop_index, *batch_indices)
            return everything._getitem(row_index, col_index, *[_noop_index] * len(everything.batch_shape))
        C = self.lin.num_outputs
        points1, rest1 = _points(row_index, self.shape[-2], C)
        points2, rest2 = _points(col_index, self.shape[-1], C)
        smaller = self._with(
            tuple(row[..., points1, :] for row in self.rows1), tuple(row[..., points2, :] for row in self.rows2)
        )
        if rest1 is None and rest2 is None:
            return smaller
        rest1, rest2 = (
            torch.arange(size, device=self.device) if rest is None else rest.to(self.device)
            for rest, size in zip((rest1, rest2), smaller.shape[-2:], strict=True)
        )
        return SlicedLinearOperator(smaller, row_index=rest1, col_index=rest2)

    def _with(self, rows1: tuple[Tensor, ...], rows2: tuple[Tensor, ...]) -> "TangentKernelLinearOperator":
        return self.__class__(*rows1, *rows2, self.S0, lin=self.lin, form=self.form)

    def _is_symmetric(self) -> bool:
        return all(a is b or torch.equal(a, b) for a, b in zip(self.rows1, self.rows2, strict=True)) and not (
            # K(x, x') at x = x' differs from K(x, x) once one of them is to be differentiated alone
            torch.is_grad_enabled()
            and any(
                a is not b and (a.requires_grad or b.requires_grad) for a, b in zip(self.rows1, self.rows2, strict=True)
            )
        )

    def _by_batch(self, function: Callable[[Features, Features, dict], Tensor], same: bool) -> Tensor:
        """Apply ``function`` to the features and covariances of each batch, all features from one capture."""
        batch = self.batch_shape
        F1 = self.lin.features(self.form.unflatten(self.rows1))
        F2 = F1 if same else self.lin.features(self.form.unflatten(self.rows2))
        if not batch:
            return function(F1, F2, self.S0.covariances)
        n, m = self.rows1[0].shape[-2], self.rows2[0].shape[-2]
        parts = []
        for i, index in enumerate(product(*(range(size) for size in batch))):
            S = PriorCovariance(*(t[index] for t in self.S0._args), **self.S0._kwargs).covariances
            parts.append(function(F1[i * n : (i + 1) * n], F2[i * m : (i + 1) * m], S))
        return torch.stack(parts).unflatten(0, batch)


def _points(index: Index, size: int, C: int) -> tuple[Index, Tensor | None]:
    """Return the points that ``index`` touches, and what it selects of their rows, None for all."""
    if isinstance(index, slice):
        start, stop, step = index.indices(size)
        if step == 1:
            first, last = start // C, -(-stop // C)
            whole = start == first * C and stop == last * C
            return slice(first, last), None if whole else torch.arange(start, stop) - first * C
        index = torch.arange(start, stop, step)
    points, inverse = torch.unique(index // C, return_inverse=True)
    return points, inverse * C + index % C
