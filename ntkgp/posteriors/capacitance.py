"""B = I + Rᵀ K R: eigenvalues of at least one, however singular Λ = R Rᵀ is."""

from torch import Tensor

from ntkgp.likelihoods import SiteBlocks

__all__ = ["capacitance", "capacitance_"]

_ROWS = 1000  # of a matrix that are copied at a time


def capacitance(K: Tensor, R: SiteBlocks) -> Tensor:  # (N C, N C)
    """Return I + Rᵀ K R, differentiable in both."""
    B = R.mT @ (R.mT @ K).mT
    return B + B.new_ones(()).expand(len(B)).diag_embed()


def capacitance_(K: Tensor, R: SiteBlocks) -> Tensor:  # (N C, N C)
    """Turn K into I + Rᵀ K R where it lies."""
    N = R.values.shape[0]
    C = len(K) // N
    step = max(1, _ROWS // C)
    for start in range(0, N, step):
        part, rows = R[start : start + step].mT, slice(start * C, min(N, start + step) * C)
        K[rows] = part @ K[rows]
    for start in range(0, N, step):
        part, rows = R[start : start + step].mT, slice(start * C, min(N, start + step) * C)
        K[:, rows] = (part @ K[:, rows].mT).mT
    K.diagonal().add_(1)
    return K
