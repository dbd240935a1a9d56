"""Dense Gram matrices from features, one triangle at a time."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ntkgp.linearization import Features
from ntkgp.operators.terms import Term, terms
from ntkgp.priors import Covariance

__all__ = ["gram", "mirror", "point_blocks"]

_PANEL_ROWS = 400  # rows a panel has: 320 to 512 are within a few per cent of each other
_MIRROR = 256  # side of the squares in which a triangle is copied to the other


def gram(
    F1: Features, F2: Features | None, S: Mapping[str, Covariance], out: Tensor | None = None
) -> Tensor:  # (N C, M C)
    """Return J_1 S₀ J_2ᵀ, J_1 S₀ J_1ᵀ if ``F2`` is None.

    Where nothing asks for gradients, the symmetric matrix is computed in panels of rows, each up to its own diagonal,
    and mirrored: half the products, plus the diagonal blocks. ``out`` is then written to.
    """
    symmetric = F2 is None
    parts = terms(F1, F1 if F2 is None else F2, S)
    C = F1.num_outputs
    N, M = F1.num_examples, F1.num_examples if F2 is None else F2.num_examples
    if not parts:
        return F1.like.new_zeros(N * C, M * C) if out is None else out.zero_()
    if _asks_for_gradients(parts):
        everything = slice(0, N), slice(0, M)
        K = parts[0].tile(*everything)
        for term in parts[1:]:
            K = K + term.tile(*everything)
        return K
    K = F1.like.new_empty(N * C, M * C) if out is None else out
    step = min(N, max(1, _PANEL_ROWS // C))
    work = K.new_empty(step * C * M * C)
    for start in range(0, N, step):
        rows = slice(start, min(start + step, N))
        cols = slice(0, rows.stop if symmetric else M)
        panel = K[rows.start * C : rows.stop * C, : cols.stop * C]
        for i, term in enumerate(parts):
            term.add_to(panel, rows, cols, i == 0, work)
    if symmetric:
        mirror(K)
    return K


def point_blocks(F1: Features, F2: Features | None, S: Mapping[str, Covariance]) -> Tensor:  # (N, C, C)
    """Return k(x_n, x'_n) for every point n: O(N), never O(N²)."""
    parts = terms(F1, F1 if F2 is None else F2, S)
    if not parts:
        return F1.like.new_zeros(F1.num_examples, F1.num_outputs, F1.num_outputs)
    return torch.stack([term.blocks() for term in parts]).sum(0) if len(parts) > 1 else parts[0].blocks()


def mirror(K: Tensor) -> None:
    """Copy the lower triangle to the upper, in place."""
    n = K.shape[0]
    for start in range(0, n, _MIRROR):
        stop = min(start + _MIRROR, n)
        K[:start, start:stop] = K[start:stop, :start].mT
        square = K[start:stop, start:stop]
        square.copy_(square.tril() + square.tril(-1).mT)


def _asks_for_gradients(parts: list[Term]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for term in parts for value in vars(term).values()
    )
