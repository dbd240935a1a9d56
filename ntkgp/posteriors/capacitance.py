"""B = I + Rᵀ K R: eigenvalues of at least one, however singular Λ = R Rᵀ is."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ntkgp.likelihoods import SiteBlocks
from ntkgp.linearization import Features
from ntkgp.operators import gram
from ntkgp.priors import Covariance
from ntkgp.solvers import ALONE, Ranks

__all__ = ["capacitance", "log_det", "pairwise_gram"]


def capacitance(K: Tensor, R: SiteBlocks) -> Tensor:  # (N C, N C) -> (N C', N C')
    """Return I + Rᵀ K R, differentiable in both."""
    B = R.mT @ (R.mT @ K).mT
    B.diagonal().add_(1)  # in place: B is ours, and nothing keeps it for a backward pass
    return B


def log_det(B: Tensor, L: Tensor) -> Tensor:  # (n, n), (n, n) -> ()
    """Return log |B| of a positive definite matrix with Cholesky factor L, differentiable once.

    Its gradient is B⁻¹: one inverse from the factor that is there, where differentiating a factorisation takes another
    one, three solves of its size and as many matrices.
    """
    return _LogDet.apply(B, L)


class _LogDet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, B: Tensor, L: Tensor) -> Tensor:
        ctx.save_for_backward(L)
        return 2 * L.diagonal().log().sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (L,) = ctx.saved_tensors
        return torch.cholesky_inverse(L).mul_(g), None


def pairwise_gram(
    features: Callable[[], Iterable[Features]], S: dict[str, Covariance], ranks: Ranks = ALONE
) -> Tensor:  # (N C, N C)
    """Return J S Jᵀ, part against part: where features are not kept, they are computed again for every pair.

    Several processes share the tiles of the lower triangle, and add up what each has.
    """
    if ranks.world == 1:
        return _assembled(_tiles(features, S, lambda i, j: True))
    finer = lambda: (part for F in features() for part in _parts(F, 2 * ranks.world))  # noqa: E731
    return ranks.summed(_assembled(_tiles(finer, S, lambda i, j: (i + j) % ranks.world == ranks.rank)))


def _tiles(
    features: Callable[[], Iterable[Features]], S: dict[str, Covariance], ours: Callable[[int, int], bool]
) -> list[list[Tensor]]:
    """Return the tiles (i, j <= i), with zeros for those of others."""
    rows: list[list[Tensor]] = []
    for i, F in enumerate(features()):
        rows.append([])
        for j, other in enumerate(features()):
            if ours(i, j):
                rows[-1].append(gram(F, None if i == j else other, S))
            else:
                C = F.num_outputs
                rows[-1].append(F.like.new_zeros(F.num_examples * C, other.num_examples * C))
            if i == j:
                break
    return rows


def _assembled(rows: list[list[Tensor]]) -> Tensor:
    if len(rows) == 1:
        return rows[0][0]
    both = [[rows[i][j] if j <= i else rows[j][i].mT for j in range(len(rows))] for i in range(len(rows))]
    return torch.cat([torch.cat(row, dim=1) for row in both])


def _parts(F: Features, count: int) -> Iterable[Features]:
    step = -(-F.num_examples // count)
    return (F[start : start + step] for start in range(0, F.num_examples, step))
