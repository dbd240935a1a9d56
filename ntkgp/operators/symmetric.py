"""A Aᵀ, one triangle of it: BLAS has a routine, which torch does not offer."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["add_square", "has_square"]

_ROUTINES = {torch.float32: "ssyrk", torch.float64: "dsyrk"}
_WORTH_IT = 1 << 24  # multiplications: smaller products take less time than the call


def has_square(A: Tensor, K: Tensor) -> bool:  # (n, p), (n, n)
    """Say whether :func:`add_square` can, and is worth its call: on the CPU, for matrices as they lie in memory."""
    plain = all(t.device.type == "cpu" and t.is_contiguous() and t.dtype in _ROUTINES for t in (A, K))
    return plain and A.dtype == K.dtype and A.numel() * len(A) >= _WORTH_IT


def add_square(K: Tensor, A: Tensor, alpha: float, fresh: bool) -> None:  # (n, n), (n, p)
    """Add α A Aᵀ to the lower triangle of K, or write it there if ``fresh``; what is above the diagonal stays.

    n² p multiplications and additions, half of the whole product. Cut into tiles, torch's products come to 1.2 times as
    much work, each at less than full speed: for a LeNet's 3600 x 12,832 Jacobian 1.2 s where this takes .9 s.
    """
    routines, threads = _blas()
    with threads.limit(limits=torch.get_num_threads(), user_api="blas"):
        # Rows of torch are Fortran's columns: K is its transpose there, and its lower triangle the upper one.
        getattr(routines, _ROUTINES[A.dtype])(
            alpha, A.detach().numpy().T, trans=1, beta=0.0 if fresh else 1.0, c=K.numpy().T, lower=0, overwrite_c=1
        )


@cache
def _blas() -> tuple[Any, Any]:
    """Return SciPy's BLAS, and what holds it to torch's number of threads; both take a while to import."""
    from scipy.linalg import blas
    from threadpoolctl import ThreadpoolController

    return blas, ThreadpoolController()
