"""What one part of the features adds to a Gram matrix: K = Σ J_1 S₀ J_2ᵀ over terms.

Each term knows its own structure. ``tile`` returns rows x columns of its share as a new, differentiable tensor;
``add_to`` writes or adds the same into a matrix that exists, with ``work`` for what has to be computed beside it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ntkgp.linearization import Block, DenseBlock, Features
from ntkgp.linearization.factors import Outer
from ntkgp.operators.symmetric import has_square
from ntkgp.priors import Covariance, Elementwise, Rotated, Separable, Uniform

__all__ = ["Term", "terms"]


class Term(Protocol):
    """One summand of K, by points: row n C + c of the matrix is output c of point n."""

    @property
    def depth(self) -> int:
        """Multiplications for one entry of K."""

    def tile(self, rows: slice, cols: slice) -> Tensor:  # (n C, m C)
        """Return the share of these points."""

    def add_to(self, K: Tensor, rows: slice, cols: slice, fresh: bool, work: Tensor) -> None:  # K: (n C, m C)
        """Add the share of these points to K; K is overwritten if ``fresh``. Not differentiable."""

    def blocks(self) -> Tensor:  # (N, C, C)
        """Return the share of k(x_n, x'_n), point by point."""


@dataclass(frozen=True)
class DenseTerm:
    """J_1 J_2ᵀ s for contracted gradients: one matrix product."""

    J1: Tensor  # (N, C, p)
    J2: Tensor  # (M, C, p), S₀ applied up to s
    s: Tensor  # ()

    @property
    def depth(self) -> int:
        """Multiplications for one entry of K."""
        return self.J1.shape[-1]

    def is_square(self, K: Tensor) -> bool:  # (N C, N C)
        """Say whether this is s J Jᵀ, and can be added to K at once."""
        return self.J1 is self.J2 and self.J1.is_contiguous() and has_square(self.J1.flatten(0, 1), K)

    def tile(self, rows: slice, cols: slice) -> Tensor:  # (n C, m C)
        """Return the share of these points."""
        return self.s * (self.J1[rows].flatten(0, 1) @ self.J2[cols].flatten(0, 1).mT)

    def add_to(self, K: Tensor, rows: slice, cols: slice, fresh: bool, work: Tensor) -> None:  # (n C, m C)
        """Add the share of these points to K."""
        J1, J2 = self.J1[rows].flatten(0, 1), self.J2[cols].flatten(0, 1)
        torch.addmm(K, J1, J2.mT, beta=0 if fresh else 1, alpha=self.s.item(), out=K)

    def blocks(self) -> Tensor:  # (N, C, C)
        """Return the share of k(x_n, x'_n), point by point."""
        return self.s * (self.J1 @ self.J2.mT)


@dataclass(frozen=True)
class OuterTerm:
    r"""(s A_1 A_2ᵀ + b) ∘ (G_1 G_2ᵀ) for a weight that meets one input a per point, with its bias.

    N² (d_in + C² d_out) multiplications where the contracted product takes N² C² d_in d_out.
    """

    A1: Tensor  # (N, d_in)
    A2: Tensor  # (M, d_in)
    s: Tensor  # variance of the weight, ()
    b: Tensor  # variance of the bias, ()
    G1: Tensor  # (N, C, d_out)
    G2: Tensor  # (M, C, d_out)

    @property
    def depth(self) -> int:
        """Multiplications for one entry of K."""
        return self.G1.shape[-1]

    @cached_property
    def inputs(self) -> Tensor:  # (N, M)
        """The Hadamard factor, one number for a pair of points."""
        return self.s * _inner(self.A1, self.A2) + self.b

    @cached_property
    def repeated_inputs(self) -> Tensor:  # (N, M C)
        """The Hadamard factor for every output of the second point."""
        return self.inputs.repeat_interleave(self.G2.shape[1], dim=1)

    def tile(self, rows: slice, cols: slice) -> Tensor:  # (n C, m C)
        """Return the share of these points."""
        A = self.inputs[rows, cols]
        product = self.G1[rows].flatten(0, 1) @ self.G2[cols].flatten(0, 1).mT
        return (_by_points(product, A) * A[:, None, :, None]).view_as(product)

    def add_to(self, K: Tensor, rows: slice, cols: slice, fresh: bool, work: Tensor) -> None:  # (n C, m C)
        """Add the share of these points to K."""
        n, m = rows.stop - rows.start, cols.stop - cols.start
        C, D = self.G1.shape[1], self.G2.shape[1]
        product = work[: n * C * m * D].view(n * C, m * D)
        torch.mm(self.G1[rows].flatten(0, 1), self.G2[cols].flatten(0, 1).mT, out=product)
        # Repeated along the columns beforehand, the factor is read in order: a fourth of the time of broadcasting.
        A = self.repeated_inputs[rows, None, cols.start * D : cols.stop * D]
        product, K = product.view(n, C, m * D), K.unflatten(0, (n, C))
        if fresh:
            torch.mul(product, A, out=K)
        else:
            K.addcmul_(product, A)

    def blocks(self) -> Tensor:  # (N, C, C)
        """Return the share of k(x_n, x'_n), point by point."""
        inputs = self.s * _inner_by_point(self.A1, self.A2) + self.b
        return inputs[:, None, None] * (self.G1 @ self.G2.mT)


@dataclass(frozen=True)
class SharedTerm:
    """(s A_1 A_2ᵀ + b) ⊗ (G_1 G_2ᵀ) where all points share their cotangents: the last layer."""

    A1: Tensor  # (N, d_in)
    A2: Tensor  # (M, d_in)
    s: Tensor  # variance of the weight, ()
    b: Tensor  # variance of the bias, ()
    G: Tensor  # (C, C)

    @property
    def depth(self) -> int:
        """Multiplications for one entry of K."""
        return 1

    @cached_property
    def inputs(self) -> Tensor:  # (N, M)
        """The left Kronecker factor, one number for a pair of points."""
        return self.s * _inner(self.A1, self.A2) + self.b

    @cached_property
    def is_diagonal(self) -> bool:
        """Whether outputs do not interact, as those of a whole last layer."""
        return torch.equal(self.G, torch.diag(self.G.diagonal()))

    def tile(self, rows: slice, cols: slice) -> Tensor:  # (n C, m C)
        """Return the share of these points."""
        return torch.kron(self.inputs[rows, cols].contiguous(), self.G)

    def add_to(self, K: Tensor, rows: slice, cols: slice, fresh: bool, work: Tensor) -> None:  # (n C, m C)
        """Add the share of these points to K; outputs that do not interact take C, not C², numbers for a pair."""
        A = self.inputs[rows, cols]
        K = _by_points(K, A)
        if fresh:
            torch.mul(A[:, None, :, None], self.G[None, :, None, :], out=K)
        elif self.is_diagonal:
            K.diagonal(dim1=1, dim2=3).addcmul_(A.unsqueeze(-1), self.G.diagonal())
        else:
            K.addcmul_(A[:, None, :, None], self.G[None, :, None, :])

    def blocks(self) -> Tensor:  # (N, C, C)
        """Return the share of k(x_n, x'_n), point by point."""
        return (self.s * _inner_by_point(self.A1, self.A2) + self.b)[:, None, None] * self.G


@dataclass(frozen=True)
class PositionsTerm:
    """Σ_tt' (A_1 A_2ᵀ) ∘ (G_1 G_2ᵀ) over pairs of positions, for weights too large to contract."""

    A1: Tensor  # (N, T, d_in), or (N, T) indices
    A2: Tensor  # (M, T, d_in)
    s: Tensor  # variance of the weight, ()
    b: Tensor  # variance of the bias, ()
    G1: Tensor  # (N, C, T, d_out)
    G2: Tensor  # (M, C, T, d_out)

    @property
    def depth(self) -> int:
        """Multiplications for one entry of K."""
        return self.G1.shape[-1] * self.G1.shape[-2] ** 2

    def tile(self, rows: slice, cols: slice) -> Tensor:  # (n C, m C)
        """Return the share of these points, a few rows at a time: pairs of positions take T² the space."""
        G1, A1, G2, A2 = self.G1[rows], self.A1[rows], self.G2[cols], self.A2[cols]
        C, (m, D, T, _) = G1.shape[1], G2.shape
        step = max(1, _PAIR_ELEMENTS // (m * C * D * T * T))
        parts = []
        for g, a in zip(G1.split(step), A1.split(step), strict=True):
            n = len(g)
            pairs = (g.flatten(0, 2) @ G2.flatten(0, 2).mT).view(n, C, T, m, D, T)
            inputs = self.s * _inner(a.flatten(0, 1), A2.flatten(0, 1)) + self.b
            parts.append((pairs * inputs.view(n, 1, T, m, 1, T)).sum((2, 5)).view(n * C, m * D))
        return torch.cat(parts)

    def add_to(self, K: Tensor, rows: slice, cols: slice, fresh: bool, work: Tensor) -> None:  # (n C, m C)
        """Add the share of these points to K."""
        _put(K, self.tile(rows, cols), fresh)

    def blocks(self) -> Tensor:  # (N, C, C)
        """Return the share of k(x_n, x'_n), point by point."""
        a, b = self.A1.unsqueeze(2), self.A2.unsqueeze(1)  # (N, T, 1, ...), (N, 1, T, ...)
        inputs = self.s * _inner_by_point(a, b) + self.b  # (N, T, T)
        return torch.einsum("ncto,ndso,nts->ncd", self.G1, self.G2, inputs)


@dataclass(frozen=True)
class UnitTerm:
    r"""Σ_i (A_1 diag(s_i) A_2ᵀ) ∘ (g_1i g_2iᵀ): a variance for each weight, one unit i after the other.

    N² d_out (d_in + C²) multiplications where the contracted product takes N² C² d_in d_out.
    """

    A1: Tensor  # (N, d_in)
    A2: Tensor  # (M, d_in)
    s: Tensor  # (d_out, d_in)
    G1: Tensor  # (N, C, d_out)
    G2: Tensor  # (M, C, d_out)

    @property
    def depth(self) -> int:
        """Multiplications for one entry of K."""
        return self.G1.shape[-1]

    def tile(self, rows: slice, cols: slice) -> Tensor:  # (n C, m C)
        """Return the share of these points."""
        A1, A2, G1, G2 = self.A1[rows], self.A2[cols], self.G1[rows], self.G2[cols]
        weights = torch.einsum("ni,oi,mi->nmo", A1, self.s, A2)
        rows_of_points = [(g * w.unsqueeze(1)) @ G2.mT for g, w in zip(G1, weights, strict=True)]  # n of (m, C, C)
        return torch.stack(rows_of_points).transpose(1, 2).flatten(2).flatten(0, 1)

    def add_to(self, K: Tensor, rows: slice, cols: slice, fresh: bool, work: Tensor) -> None:  # (n C, m C)
        """Add the share of these points to K."""
        _put(K, self.tile(rows, cols), fresh)

    def blocks(self) -> Tensor:  # (N, C, C)
        """Return the share of k(x_n, x'_n), point by point."""
        weights = (self.A1 * self.A2) @ self.s.mT  # (N, d_out)
        return (self.G1 * weights.unsqueeze(1)) @ self.G2.mT


_PAIR_ELEMENTS = 1 << 24  # numbers in a tile of pairs of positions


def terms(F1: Features, F2: Features, S: Mapping[str, Covariance]) -> list[Term]:
    """Split J_1 S₀ J_2ᵀ into terms; parameters without a covariance take no part."""
    found: list[Term] = []
    if F1.form != F2.form:  # a network may compute batches of different sizes in different ways
        F1, F2 = F1.contracted(), F2.contracted()
    for block1, block2 in zip(F1.blocks, F2.blocks, strict=True):
        found += _block_terms(block1, block2, S)
    for dense1, dense2 in zip(F1.dense, F2.dense, strict=True):
        some = {name: S[name] for name in dense1.columns if name in S}
        if some:
            found.append(_dense_term(dense1, dense2, some))
    return found


def _dense_term(F1: DenseBlock, F2: DenseBlock, S: dict[str, Covariance]) -> Term:
    s = _common_variance(list(S.values()))
    if s is None and F1 is F2 and _has_plain_roots(list(S.values())):  # one copy of J, as for J S₀, half of the product
        J = torch.cat([cov.root().apply(F1.J[..., F1.columns[name]]) for name, cov in S.items()], dim=-1)
        return DenseTerm(J, J, J.new_ones(()))
    J1 = _columns(F1, S)
    if s is None:
        J2 = torch.cat([cov.apply(F2.J[..., F2.columns[name]]) for name, cov in S.items()], dim=-1)
        return DenseTerm(J1, J2, J2.new_ones(()))
    return DenseTerm(J1, J1 if F1 is F2 else _columns(F2, S), s)


def _columns(F: DenseBlock, S: dict[str, Covariance]) -> Tensor:  # (N, C, p)
    return F.J if len(S) == len(F.columns) else torch.cat([F.J[..., F.columns[name]] for name in S], dim=-1)


def _has_plain_roots(S: list[Covariance]) -> bool:
    """Say whether all covariances are diagonal, and square roots of them are safe: no gradient meets a zero."""
    if not all(isinstance(cov, Uniform | Elementwise) for cov in S):
        return False
    variances = [cov.s for cov in S if isinstance(cov, Uniform | Elementwise)]
    learnt = torch.is_grad_enabled() and any(s.requires_grad for s in variances)
    return not learnt and all(bool((s >= 0).all()) for s in variances)


def _common_variance(S: list[Covariance]) -> Tensor | None:
    """Return s if all covariances are s I, and no gradient has to tell them apart."""
    variances = [cov.s for cov in S if isinstance(cov, Uniform)]
    if len(variances) < len(S):
        return None
    learnt = torch.is_grad_enabled() and any(s.requires_grad for s in variances)
    first = variances[0]
    same = all(s is first for s in variances) or (not learnt and all(torch.equal(s, first) for s in variances))
    return first if same else None


def _block_terms(block1: Block, block2: Block, S: Mapping[str, Covariance]) -> list[Term]:
    weight, bias = S.get(block1.weight), S.get(block1.bias) if block1.bias is not None else None
    o1, o2 = block1.outer, block2.outer
    zero = o1.G.new_zeros(())
    if isinstance(weight, Uniform) and (bias is None or isinstance(bias, Uniform)):
        return [_factored(o1, o2, weight.s, zero if bias is None else bias.s)]
    found: list[Term] = []
    if isinstance(weight, Uniform):
        found.append(_factored(o1, o2, weight.s, zero))
    elif isinstance(weight, Separable):
        left, right = weight.apply_left, weight.apply_right
        on_G, on_A = (right, left) if o1.transposed else (left, right)
        if o2.has_indices:
            found.append(_contracted(o1, o2, weight))
        else:
            found.append(_factored(o1, replace(o2, G=on_G(o2.G), A=on_A(o2.inputs)), zero + 1, zero))
    elif isinstance(weight, Elementwise):
        if o1.positions > 1 or o1.shared or o1.has_indices:
            found.append(_contracted(o1, o2, weight))
        else:
            s = weight.s.view(o1.d_in, -1).mT if o1.transposed else weight.s.view(-1, o1.d_in)
            found.append(UnitTerm(o1.inputs[:, 0], o2.inputs[:, 0], s, o1.G[:, :, 0], o2.G[:, :, 0]))
    elif isinstance(weight, Rotated):
        found.append(_rotated(o1, o2, weight))
    if bias is not None:
        n, m = o1.inputs.shape[0], o2.inputs.shape[0]
        J1, J2 = (replace(o, A=None).dense().expand(size, -1, -1) for o, size in ((o1, n), (o2, m)))
        found.append(DenseTerm(J1, bias.apply(J2), zero + 1))
    return found


def _contracted(o1: Outer, o2: Outer, weight: Covariance) -> Term:
    return DenseTerm(o1.dense(), weight.apply(o2.dense()), o1.G.new_ones(()))


def _rotated(o1: Outer, o2: Outer, weight: Rotated) -> Term:
    """In the basis of the covariance every weight has a variance of its own."""
    if o1.positions > 1 or o1.has_indices:
        return _contracted(o1, o2, weight)
    on_G, on_A, s = (weight.W, weight.Q, weight.m.mT) if o1.transposed else (weight.Q, weight.W, weight.m)
    (A1, G1), (A2, G2) = (
        (o.inputs[:, 0] @ on_A, (o.G[:, :, 0] @ on_G).expand(o.inputs.shape[0], -1, -1)) for o in (o1, o2)
    )
    return UnitTerm(A1, A2, s, G1, G2)


def _factored(o1: Outer, o2: Outer, s: Tensor, b: Tensor) -> Term:
    if o1.positions > 1:
        return PositionsTerm(o1.inputs, o2.inputs, s, b, o1.G, o2.G)
    if o1.shared and o2.shared:
        return SharedTerm(o1.inputs[:, 0], o2.inputs[:, 0], s, b, o1.G[0, :, 0] @ o2.G[0, :, 0].mT)
    G1, G2 = (o.G[:, :, 0].expand(o.inputs.shape[0], -1, -1) for o in (o1, o2))
    return OuterTerm(o1.inputs[:, 0], o2.inputs[:, 0], s, b, G1, G2)


def _inner(A1: Tensor, A2: Tensor) -> Tensor:  # (n, d_in), (m, d_in) -> (n, m)
    """Return the inner products of all inputs; those of unit vectors are comparisons of indices."""
    return A1 @ A2.mT if A1.is_floating_point() else A1[:, None] == A2


def _inner_by_point(A1: Tensor, A2: Tensor) -> Tensor:  # (..., d_in), (..., d_in) -> (...)
    return (A1 * A2).sum(-1) if A1.is_floating_point() else A1 == A2


def _by_points(K: Tensor, A: Tensor) -> Tensor:  # (n C, m C), (n, m) -> (n, C, m, C)
    return K.unflatten(0, (A.shape[0], -1)).unflatten(2, (A.shape[1], -1))


def _put(K: Tensor, tile: Tensor, fresh: bool) -> None:
    if fresh:
        K.copy_(tile)
    else:
        K.add_(tile)
