"""Dense Gram matrices from features, tile by tile and one triangle of symmetric ones."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ntkgp.linearization import Features
from ntkgp.linearization.memory import empty
from ntkgp.operators.terms import Term, terms
from ntkgp.priors import Covariance

__all__ = ["gram", "mirror", "point_blocks"]

_TILE = 800  # side of a tile: its parts stay in the caches while terms are added
_MIRROR = 256  # columns that are transposed at a time


def gram(
    F1: Features, F2: Features | None, S: Mapping[str, Covariance], out: Tensor | None = None
) -> Tensor:  # (N C, M C)
    """Return J_1 S₀ J_2ᵀ, J_1 S₀ J_1ᵀ if ``F2`` is None.

    Where nothing asks for gradients, the matrix is computed tile by tile, all terms of a tile while it is in the
    caches; of a symmetric one only the tiles up to the diagonal, which are then mirrored. ``out`` is then written to.
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
    K = empty((N * C, M * C), F1.like) if out is None else out
    step = min(max(N, M), max(1, _TILE // C))
    work = K.new_empty((step * C) ** 2)
    for rows in _tiles(N, step):
        for cols in _tiles(rows.stop if symmetric else M, step):
            tile = _entries(K, rows, cols, C)
            for i, term in enumerate(parts):
                term.add_to(tile, rows, cols, i == 0, work)
        if symmetric:  # while the tiles are still in the caches
            _mirror(K, rows.start * C, rows.stop * C)
    return K


def _tiles(n: int, step: int) -> Iterator[slice]:
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def _entries(K: Tensor, rows: slice, cols: slice, C: int) -> Tensor:
    return K[rows.start * C : rows.stop * C, cols.start * C : cols.stop * C]


def point_blocks(F1: Features, F2: Features | None, S: Mapping[str, Covariance]) -> Tensor:  # (N, C, C)
    """Return k(x_n, x'_n) for every point n: O(N), never O(N²)."""
    parts = terms(F1, F1 if F2 is None else F2, S)
    if not parts:
        return F1.like.new_zeros(F1.num_examples, F1.num_outputs, F1.num_outputs)
    return torch.stack([term.blocks() for term in parts]).sum(0) if len(parts) > 1 else parts[0].blocks()


def mirror(K: Tensor) -> None:
    """Copy the lower triangle to the upper, in place."""
    for rows in _tiles(K.shape[0], _TILE):
        _mirror(K, rows.start, rows.stop)


def _mirror(K: Tensor, start: int, stop: int) -> None:
    """Copy these rows, up to the diagonal, to the columns above it."""
    for cols in _tiles(start, _MIRROR):
        K[cols, start:stop] = K[start:stop, cols].mT
    square = K[start:stop, start:stop]
    square.copy_(square.tril() + square.tril(-1).mT)


def _asks_for_gradients(parts: list[Term]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for term in parts for value in vars(term).values()
    )
