"""The generalised Gauss-Newton matrix Jᵀ Λ J as a lazy matrix."""

import torch
from linear_operator import LinearOperator
from torch import Tensor

from ntkgp.linearization import Linearization
from ntkgp.operators.jacobian import batched_jvp, batched_vjp, in_dtype_of
from ntkgp.operators.rows import RowForm
from ntkgp.operators.sliced import LazySlices

__all__ = ["GGNLinearOperator"]


class GGNLinearOperator(LazySlices):
    r"""J(x)ᵀ Λ J(x), (*batch, P, P), with Λ one symmetric block for each point.

    Args:
        args: the rows of x, one tensor (*batch, N, D) for each tensor the network takes, and Λ, (*batch, N, C, C).
        lin: the linearised network.
        form: how rows become inputs.
    """

    def __init__(self, *args: Tensor, lin: Linearization, form: RowForm) -> None:
        lin = in_dtype_of(lin, args)
        super().__init__(*args, lin=lin, form=form)
        *rows, self.curvature = args
        self.rows, self.lin, self.form = tuple(rows), lin, form

    def _matmul(self, rhs: Tensor) -> Tensor:  # (*batch, P, S) or (P,)
        if rhs.ndim == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        f = batched_jvp(self.lin, self.rows, self.form, rhs).unflatten(-2, (-1, self.lin.num_outputs))
        return batched_vjp(self.lin, self.rows, self.form, (self.curvature @ f).flatten(-3, -2))

    def _size(self) -> torch.Size:
        return torch.Size([*self.rows[0].shape[:-2], self.lin.num_params, self.lin.num_params])

    def _transpose_nonbatch(self) -> LinearOperator:
        return GGNLinearOperator(*self.rows, self.curvature.mT, lin=self.lin, form=self.form)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the network."""
        return self.lin.dtype
