"""S₀, parameter by parameter and as one lazy matrix."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor

from ntkgp.linearization.layout import ParameterLayout

__all__ = ["Covariance", "Elementwise", "PriorCovariance", "Rotated", "Separable", "Uniform", "rows_times"]


@dataclass(frozen=True)
class Uniform:
    """s I: every number of the parameter has variance s."""

    s: Tensor  # (*batch)

    def apply(self, J: Tensor) -> Tensor:  # (*batch, ..., p) -> (*batch, ..., p)
        """Multiply the rows of J by the covariance."""
        return J * self.s[..., None, None]

    def root(self) -> "Uniform":
        """Return L with L Lᵀ the covariance."""
        return Uniform(self.s.sqrt())

    def inverse(self) -> "Uniform":
        """Return the inverse."""
        return Uniform(self.s.reciprocal())

    @property
    def mT(self) -> "Uniform":
        """The transpose."""
        return self

    def diagonal(self, size: int) -> Tensor:  # (*batch, p)
        """Return the variances."""
        return self.s.unsqueeze(-1).expand(*self.s.shape, size)


@dataclass(frozen=True)
class Elementwise:
    """diag(s): a variance for every number."""

    s: Tensor  # (*batch, p)

    def apply(self, J: Tensor) -> Tensor:  # (*batch, ..., p) -> (*batch, ..., p)
        """Multiply the rows of J by the covariance."""
        return J * self.s.unsqueeze(-2)

    def root(self) -> "Elementwise":
        """Return L with L Lᵀ the covariance."""
        return Elementwise(self.s.sqrt())

    def inverse(self) -> "Elementwise":
        """Return the inverse."""
        return Elementwise(self.s.reciprocal())

    @property
    def mT(self) -> "Elementwise":
        """The transpose."""
        return self

    def diagonal(self, size: int) -> Tensor:  # (*batch, p)
        """Return the variances."""
        return self.s


@dataclass(frozen=True)
class Separable:
    r"""U ⊗ I ⊗ V over the first, middle and last indices of a parameter seen as (d_0, the rest).

    U acts on the first dimension, V on the last r numbers of the flattened rest; r may be all of it (a Kronecker
    prior), or a filter (the same covariance for every filter of a convolution). None stands for the identity.
    """

    U: Tensor | None  # (*batch, d_0, d_0)
    V: Tensor | None  # (*batch, r, r)
    d_0: int

    def apply(self, J: Tensor) -> Tensor:  # (*batch, ..., p) -> (*batch, ..., p)
        """Multiply the rows of J by the covariance."""
        rows = J.unflatten(-1, (self.d_0, -1))
        rows = rows if self.U is None else self.U.mT.unsqueeze(-3) @ rows
        if self.V is None:
            return rows.flatten(-2)
        rows = rows.unflatten(-1, (-1, self.V.shape[-1]))
        return (rows @ self.V[..., None, None, :, :]).flatten(-3)

    def root(self) -> "Separable":
        """Return L with L Lᵀ the covariance, lower triangular."""
        return self._mapped(torch.linalg.cholesky)

    def inverse(self) -> "Separable":
        """Return the inverse."""
        return self._mapped(torch.linalg.inv)

    @property
    def mT(self) -> "Separable":
        """The transpose."""
        return self._mapped(lambda factor: factor.mT)

    def _mapped(self, fn: Callable[[Tensor], Tensor]) -> "Separable":
        return replace(self, U=None if self.U is None else fn(self.U), V=None if self.V is None else fn(self.V))

    def apply_left(self, G: Tensor) -> Tensor:  # (..., d_0) -> (..., d_0)
        """Multiply by U."""
        return G if self.U is None else G @ self.U

    def apply_right(self, A: Tensor) -> Tensor:  # (..., rest) -> (..., rest)
        """Multiply by I ⊗ V."""
        return A if self.V is None else (A.unflatten(-1, (-1, self.V.shape[-1])) @ self.V).flatten(-2)

    def diagonal(self, size: int) -> Tensor:  # (*batch, p)
        """Return the variances."""
        u = self._ones(self.d_0) if self.U is None else self.U.diagonal(dim1=-2, dim2=-1)
        v = self._ones(1) if self.V is None else self.V.diagonal(dim1=-2, dim2=-1)
        repeats = size // (self.d_0 * v.shape[-1])
        return (u[..., :, None, None] * v[..., None, None, :].expand(*v.shape[:-1], 1, repeats, -1)).flatten(-3)

    def _ones(self, n: int) -> Tensor:  # (n,)
        for factor in (self.U, self.V):
            if factor is not None:
                return factor.new_ones(n)
        return torch.ones(n)


@dataclass(frozen=True)
class Rotated:
    r"""(Q ⊗ W) diag(m) (Q ⊗ W)ᵀ: variances m in a basis that is a Kronecker product, as Kronecker posteriors have."""

    Q: Tensor  # (d_0, d_0)
    W: Tensor  # (rest, rest)
    m: Tensor  # (d_0, rest)

    def apply(self, J: Tensor) -> Tensor:  # (..., p) -> (..., p)
        """Multiply the rows of J by the covariance."""
        rows = J.unflatten(-1, self.m.shape)
        return (self.Q @ ((self.Q.mT @ rows @ self.W) * self.m) @ self.W.mT).flatten(-2)

    def root(self) -> "RotatedRoot":
        """Return L with L Lᵀ the covariance."""
        return RotatedRoot(self.Q, self.W, self.m.sqrt())

    def inverse(self) -> "Rotated":
        """Return the inverse."""
        return Rotated(torch.linalg.inv(self.Q).mT, torch.linalg.inv(self.W).mT, self.m.reciprocal())

    @property
    def mT(self) -> "Rotated":
        """The transpose."""
        return self

    def diagonal(self, size: int) -> Tensor:  # (p,)
        """Return the variances."""
        return (self.Q.square() @ self.m @ self.W.square().mT).flatten()


@dataclass(frozen=True)
class RotatedRoot:
    """(Q ⊗ W) diag(m), or its transpose."""

    Q: Tensor  # (d_0, d_0)
    W: Tensor  # (rest, rest)
    m: Tensor  # (d_0, rest)
    transposed: bool = False

    def apply(self, J: Tensor) -> Tensor:  # (..., p) -> (..., p)
        """Multiply the rows of J by the root."""
        rows = J.unflatten(-1, self.m.shape)
        if self.transposed:
            return (self.Q @ (rows * self.m) @ self.W.mT).flatten(-2)
        return ((self.Q.mT @ rows @ self.W) * self.m).flatten(-2)

    @property
    def mT(self) -> "RotatedRoot":
        """The transpose."""
        return replace(self, transposed=not self.transposed)


Covariance = Uniform | Elementwise | Separable | Rotated
_TENSORS = ("s", "U", "V")


def rows_times(J: Tensor, S: Mapping[str, Any], layout: ParameterLayout) -> Tensor:  # (..., P) -> (..., P)
    """Return J S for a matrix that is block diagonal over parameters."""
    rows = J.reshape(-1, layout.num_params).split(layout.sizes, dim=-1)
    parts = [S[name].apply(part) for name, part in zip(layout.names, rows, strict=True)]
    return torch.cat(parts, dim=-1).view(J.shape)


class PriorCovariance(LinearOperator):
    """S₀, (*batch, P, P), block diagonal over parameters.

    Args:
        tensors: what the covariances are made of, in order.
        layout: names, sizes and order of the parameters.
        templates: the covariances whose tensors are to be replaced by ``tensors``.
    """

    def __init__(self, *tensors: Tensor, layout: ParameterLayout, templates: tuple[Covariance, ...]) -> None:
        super().__init__(*tensors, layout=layout, templates=templates)
        self.layout = layout
        remaining = iter(tensors)
        self._covariances = tuple(_filled(template, remaining) for template in templates)

    @classmethod
    def of(cls, covariances: Mapping[str, Covariance], layout: ParameterLayout) -> "PriorCovariance":
        """Return the lazy matrix with these blocks."""
        ordered = tuple(covariances[name] for name in layout.names)
        tensors = [getattr(covariance, field) for covariance in ordered for field in _fields(covariance)]
        return cls(*tensors, layout=layout, templates=ordered)

    @property
    def covariances(self) -> dict[str, Covariance]:
        """The covariance of each parameter."""
        return dict(zip(self.layout.names, self._covariances, strict=True))

    def _matmul(self, rhs: Tensor) -> Tensor:  # (*batch, P, S) or (P,)
        if rhs.ndim == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        parts = rhs.mT.split(self.layout.sizes, dim=-1)
        return torch.cat([c.apply(part) for c, part in zip(self._covariances, parts, strict=True)], dim=-1).mT

    def _size(self) -> torch.Size:
        P = self.layout.num_params
        return torch.Size([*self._covariances[0].diagonal(self.layout.sizes[0]).shape[:-1], P, P])

    def _transpose_nonbatch(self) -> LinearOperator:
        return self

    def _diagonal(self) -> Tensor:
        sizes = self.layout.sizes
        return torch.cat([c.diagonal(size) for c, size in zip(self._covariances, sizes, strict=True)], dim=-1)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        old = len(self.batch_shape)
        tensors = [t.expand(*batch_shape, *t.shape[old:]) for t in self._args]
        return self.__class__(*tensors, **self._kwargs)


def _filled(template: Any, tensors: Iterator[Tensor]) -> Covariance:
    return replace(template, **{field: next(tensors) for field in _fields(template)})


def _fields(covariance: Covariance) -> list[str]:
    return [field for field in _TENSORS if getattr(covariance, field, None) is not None]
