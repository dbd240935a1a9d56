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

__all__ = ["capacitance", "log_det", "pairwise_gram"]


def capacitance(K: Tensor, R: SiteBlocks) -> Tensor:  # (N C, N C) -> (N C', N C')
    """Return I + Rᵀ K R, differentiable in both."""
    B = R.mT @ (R.mT @ K).mT
    return B + B.new_ones(()).expand(len(B)).diag_embed()


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
        return g * torch.cholesky_inverse(L), None


def pairwise_gram(features: Callable[[], Iterable[Features]], S: dict[str, Covariance]) -> Tensor:  # (N C, N C)
    """Return J S Jᵀ, chunk against chunk: where features are not kept, they are computed again for every pair."""
    rows: list[list[Tensor]] = []
    for i, F in enumerate(features()):
        rows.append([])
        for j, other in enumerate(features()):
            if j == i:
                rows[-1].append(gram(F, None, S))
                break
            rows[-1].append(gram(F, other, S))
    if len(rows) == 1:
        return rows[0][0]
    both = [[rows[i][j] if j <= i else rows[j][i].mT for j in range(len(rows))] for i in range(len(rows))]
    return torch.cat([torch.cat(row, dim=1) for row in both])
