"""Dense Gram matrices from features, tile by tile and one triangle of symmetric ones."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from math import ceil

import torch
from torch import Tensor

from ntkgp.linearization import Features
from ntkgp.linearization.memory import empty, keep_freed_memory
from ntkgp.operators.symmetric import add_square, transpose
from ntkgp.operators.terms import DenseTerm, Term, terms
from ntkgp.priors import Covariance

__all__ = ["gram", "point_blocks"]

_TILE = 1000  # side of a tile: its parts stay in the caches while terms are added
_LEAF = 250  # side of the squares on the diagonal, of which half is wasted
_HEAVY = 1000  # multiplications for an entry from which smaller squares, half as large, pay


def gram(
    F1: Features, F2: Features | None, S: Mapping[str, Covariance], out: Tensor | None = None
) -> Tensor:  # (N C, M C)
    """Return J_1 S₀ J_2ᵀ, J_1 S₀ J_1ᵀ if ``F2`` is None; the two may have different numbers of outputs.

    Where nothing asks for gradients, the matrix is computed tile by tile, all terms of a tile while it is in the
    caches; of a symmetric one only the tiles up to the diagonal, which are then mirrored, and J Jᵀ of contracted
    gradients at once. ``out`` is then written to.
    """
    symmetric = F2 is None
    parts = terms(F1, F1 if F2 is None else F2, S)
    C, D = F1.num_outputs, F1.num_outputs if F2 is None else F2.num_outputs
    N, M = F1.num_examples, F1.num_examples if F2 is None else F2.num_examples
    if not parts:
        return F1.like.new_zeros(N * C, M * D) if out is None else out.zero_()
    if _asks_for_gradients(parts):
        everything = slice(0, N), slice(0, M)
        K = parts[0].tile(*everything)
        for term in parts[1:]:
            K = K + term.tile(*everything)
        return K
    keep_freed_memory()
    K = empty((N * C, M * D), F1.like) if out is None else out
    squares = symmetric and _add_squares(K, parts)
    heavy = sum(term.depth for term in parts) > _HEAVY
    step, leaf = max(1, _TILE // C), max(1, _LEAF // (2 if heavy else 1) // C)
    work = K.new_empty(min(step, N) * min(step, M) * C * D)
    for rows, cols in _triangle(0, N, leaf, step) if symmetric else _rectangle((0, N), (0, M), step):
        tile = K[rows.start * C : rows.stop * C, cols.start * D : cols.stop * D]
        for i, term in enumerate(parts):
            term.add_to(tile, rows, cols, not squares and i == 0, work)
        if symmetric:  # while the tile is still in the caches
            if rows == cols:
                torch.where(_upper(len(tile), tile.device), tile.mT.contiguous(), tile, out=tile)
            else:
                transpose(tile, K[cols.start * C : cols.stop * C, rows.start * C : rows.stop * C])
    return K


def _add_squares(K: Tensor, parts: list[Term]) -> bool:
    """Write terms s J Jᵀ to the lower triangle of K, take them out of the list, and say whether there were any."""
    squares = [term for term in parts if isinstance(term, DenseTerm) and term.is_square(K)]
    for i, term in enumerate(squares):
        add_square(K, term.J1.flatten(0, 1), term.s.item(), fresh=i == 0)
    parts[:] = [term for term in parts if all(term is not square for square in squares)]
    return bool(squares)


@lru_cache(maxsize=8)
def _upper(n: int, device: torch.device) -> Tensor:  # (n, n)
    """Return what lies above the diagonal; the squares there have a size or two."""
    return torch.ones(n, n, dtype=torch.bool, device=device).triu(1)


def _triangle(start: int, stop: int, leaf: int, step: int) -> Iterator[tuple[slice, slice]]:
    """Cover the lower triangle: halve it until the squares on the diagonal, of which half is wasted, are small."""
    if stop - start <= leaf:
        yield slice(start, stop), slice(start, stop)
        return
    middle = (start + stop) // 2
    yield from _triangle(start, middle, leaf, step)
    yield from _rectangle((middle, stop), (start, middle), step)
    yield from _triangle(middle, stop, leaf, step)


def _rectangle(rows: tuple[int, int], cols: tuple[int, int], step: int) -> Iterator[tuple[slice, slice]]:
    for i in _parts(*rows, step):
        for j in _parts(*cols, step):
            yield i, j


def _parts(start: int, stop: int, step: int) -> list[slice]:
    """Cut a range into parts of almost equal length, none longer than ``step``."""
    count = ceil((stop - start) / step)
    ends = [start + (stop - start) * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def point_blocks(F1: Features, F2: Features | None, S: Mapping[str, Covariance]) -> Tensor:  # (N, C, C)
    """Return k(x_n, x'_n) for every point n: O(N), never O(N²)."""
    parts = terms(F1, F1 if F2 is None else F2, S)
    if not parts:
        return F1.like.new_zeros(F1.num_examples, F1.num_outputs, F1.num_outputs)
    return torch.stack([term.blocks() for term in parts]).sum(0) if len(parts) > 1 else parts[0].blocks()


def _asks_for_gradients(parts: list[Term]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for term in parts for value in vars(term).values()
    )
