"""The tangent kernel as a GPyTorch kernel."""

from collections.abc import Callable
from typing import Any

import gpytorch
import torch
from linear_operator import LinearOperator
from torch import Tensor, nn

from ntkgp.linearization import Linearization
from ntkgp.linearization.inputs import Input, batch_size, leaves, same_input
from ntkgp.operators import ENGINES, Plan, RowForm, TangentKernelLinearOperator, gram, make_plan, point_blocks
from ntkgp.priors import LinearPrior, Prior

__all__ = ["NTKKernel"]


class NTKKernel(gpytorch.kernels.Kernel):
    r"""k(x, x') = J(x) S₀ J(x')ᵀ, C x C numbers for a pair of points, point-major in matrices.

    As a GPyTorch kernel it takes rows, (..., N, D); ``gram``, ``blocks`` and ``operator`` take inputs in the network's
    own shape, dicts and tuples included. The network is data, not a hyperparameter: it is not among ``parameters()``
    or ``state_dict()``, and ``train()`` does not reach it.

    Args:
        lin: the linearised network.
        prior: S₀; its hyperparameters are the kernel's.
        input_shape: how a row of D numbers becomes the network's input; None if rows are what it takes.
        engine: how dense matrices are computed: "layerwise", "jacobian", "products", or "auto" for the one with the
            fewest operations.
        memory_budget: bytes that features, and a dense matrix in ``forward``, may take; larger matrices stay lazy.
        kwargs: ``active_dims`` and what else GPyTorch's kernels take.

    Raises:
        ValueError: if the prior is over other parameters than the linearisation.
    """

    def __init__(
        self,
        lin: Linearization,
        prior: Prior,
        input_shape: tuple[int, ...] | None = None,
        engine: str = "auto",
        memory_budget: int = 4 << 30,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if prior.layout != lin.layout:
            raise ValueError("prior is over other parameters than lin: make it from the same linearization")
        self.lin = lin
        self.prior = prior
        self.input_shape = None if input_shape is None else torch.Size(input_shape)
        if engine not in ("auto", *ENGINES):
            raise ValueError(f"engine must be auto, {' or '.join(ENGINES)}, but is {engine!r}")
        self.engine = engine
        self._choices: dict[tuple, str] = {}
        self.memory_budget = memory_budget

    # In the network's own shapes

    def gram(
        self, x1: Input, x2: Input | None = None, out: Tensor | None = None
    ) -> Tensor:  # (*batch of the prior, N1 C, N2 C)
        """Return K(x1, x2), K(x1, x1) by default, as a dense matrix.

        Args:
            x1: the points along the rows.
            x2: the points along the columns.
            out: where to write K; only without gradients, as for torch's own functions.
        """
        if out is not None:
            with torch.no_grad():
                return self._compute(x1, x2, out)
        if x2 is not None and same_input(x1, x2) and not _any_requires_grad(x1, x2):
            x2 = None
        if _any_requires_grad(x1, x1 if x2 is None else x2):
            return self.operator(x1, x2).to_dense()
        if not isinstance(self.prior, LinearPrior):
            return self._compute(x1, x2)
        key = ("gram", self.prior.atoms_key)
        learning = torch.is_grad_enabled() and any(p.requires_grad for p in self.prior.parameters())
        if not learning and not self.lin.cache.has(key, (x1, x2)):
            return self._compute(x1, x2)
        K = self.lin.cache.get(key, (x1, x2), lambda: self._atom_grams(x1, x2))  # (atoms, N1 C, N2 C)
        return torch.tensordot(self.prior.coefficients(), K, 1)

    def plan(self, n1: int, n2: int | None = None) -> Plan:
        """Return what K of n1 x n2 points (n1 x n1 by default) takes, layer by layer: ``print`` it."""
        return make_plan(self.lin, n1, n2, self.engine, self.memory_budget)

    def _compute(self, x1: Input, x2: Input | None, out: Tensor | None = None) -> Tensor:
        if self.batch_shape:
            K = self.operator(x1, x2).to_dense()
            return K if out is None else out.copy_(K)
        self.lin.learn(x1)
        engine = self.engine
        if engine == "auto":
            engine = self._choice(batch_size(x1), None if x2 is None else batch_size(x2))
        return ENGINES[engine](self.lin, x1, x2, self.prior.covariance(), self.memory_budget, out)

    def _choice(self, n1: int, n2: int | None) -> str:
        """Remember the plan's choice: counting takes a capture of its own."""
        key = self.lin, n1, n2
        if key not in self._choices:
            self._choices[key] = self.plan(n1, n2).engine
        return self._choices[key]

    def _atom_grams(self, x1: Input, x2: Input | None) -> Tensor:  # (atoms, N1 C, N2 C)
        with torch.no_grad():
            F1 = self.lin.features(x1)
            F2 = None if x2 is None else self.lin.features(x2)
            return torch.stack([gram(F1, F2, atom) for atom in self.prior.atoms])

    def blocks(self, x: Input) -> Tensor:  # (*batch of the prior, N, C, C)
        """Return k(x_n, x_n) for every point: O(N)."""
        F = self.lin.features(x)
        if not self.batch_shape:
            return point_blocks(F, None, self.prior.covariances())
        return torch.tensordot(
            self.prior.coefficients(), torch.stack([point_blocks(F, None, atom) for atom in self.prior.atoms]), 1
        )

    def operator(self, x1: Input, x2: Input | None = None) -> TangentKernelLinearOperator:  # (N1 C, N2 C)
        """Return K(x1, x2), K(x1, x1) by default, as a lazy matrix."""
        form = RowForm.of(x1)
        self.lin.learn(x1)
        rows1 = form.flatten(x1)
        if x2 is None:
            rows2 = rows1
        elif RowForm.of(x2) != form:
            raise ValueError(f"x2 must look like x1, whose examples have shapes {form.shapes}, but is unlike it")
        else:
            rows2 = form.flatten(x2)
        return TangentKernelLinearOperator(*rows1, *rows2, self.prior.covariance(), lin=self.lin, form=form)

    def select(self, outputs: int | list[int] | str | Tensor) -> "NTKKernel":
        """Return the kernel of some outputs, or of combinations of them; see :meth:`Linearization.select`."""
        return NTKKernel(self.lin.select(outputs), self.prior, self.input_shape, self.engine, self.memory_budget)

    # As GPyTorch calls it

    def forward(
        self,
        x1: Tensor,
        x2: Tensor,
        diag: bool = False,
        **params: Any,
    ) -> Tensor | LinearOperator:  # (..., N C, M C), or (..., N C) if diag
        """Return the kernel of rows, dense if it fits the memory budget, lazy otherwise."""
        if params.get("last_dim_is_batch", False):
            raise ValueError("last_dim_is_batch is not supported: a network does not split over input dimensions")
        K = self._row_operator(x1, x2)
        if diag:
            return K._diagonal()
        if K.shape.numel() * torch.finfo(self.lin.dtype).bits // 8 > self.memory_budget:
            return K
        if x1.ndim == 2 and x2.ndim == 2:
            return self.gram(self._unflatten(x1), self._unflatten(x2))
        return K.to_dense()

    def row_blocks(self, x: Tensor) -> Tensor:  # (N, D) -> (*batch of the prior, N, C, C)
        """Return k(x_n, x_n) for rows, as ``forward`` takes them."""
        return self.blocks(self._unflatten(x))

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """Return C."""
        self.lin.learn(self._unflatten(x1))
        return self.lin.num_outputs

    def _row_operator(self, x1: Tensor, x2: Tensor) -> TangentKernelLinearOperator:
        self.lin.learn(self._unflatten(x1))
        form = RowForm((x1.shape[-1:] if self.input_shape is None else self.input_shape,))
        return TangentKernelLinearOperator(x1, x2, self.prior.covariance(), lin=self.lin, form=form)

    def _unflatten(self, x: Tensor) -> Tensor:  # (..., N, D) -> (... N, *input_shape)
        shape = x.shape[-1:] if self.input_shape is None else self.input_shape
        if shape.numel() != x.shape[-1]:
            raise ValueError(
                f"x has rows of {x.shape[-1]} numbers, but input_shape {tuple(shape)} needs {shape.numel()}"
            )
        return x.reshape(-1, *shape)

    # As modules are copied, moved and indexed

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch of priors."""
        return self.prior.batch_shape if "prior" in self._modules else torch.Size([])

    @batch_shape.setter
    def batch_shape(self, value: torch.Size) -> None:
        if torch.Size(value) != self.batch_shape:
            raise ValueError("batch_shape follows from the prior: give it precisions of shape (*batch, groups)")

    def expand_batch(self, *sizes: Any) -> "NTKKernel":
        """Return the kernel with its prior expanded to a batch shape; the network is shared."""
        shape = torch.Size(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
        return self if shape == self.batch_shape else self._with_prior(self.prior.expand_batch(shape))

    def __getitem__(self, index: Any) -> "NTKKernel":
        if not self.batch_shape:
            return self
        return self._with_prior(self.prior[index if isinstance(index, tuple) else (index,)])

    def _with_prior(self, prior: Prior) -> "NTKKernel":
        dims = None if self.active_dims is None else self.active_dims.clone()
        return NTKKernel(self.lin, prior, self.input_shape, self.engine, self.memory_budget, active_dims=dims)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        self.lin = self.lin.converted(lambda module: module._apply(fn))
        return self


def _any_requires_grad(*inputs: Input) -> bool:
    return torch.is_grad_enabled() and any(leaf.requires_grad for x in inputs for leaf in leaves(x))
