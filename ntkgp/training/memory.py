"""Let the C library keep what a training step frees: the next step asks for the same again."""

import torch

__all__ = ["keep_freed_memory"]

_LARGEST = 31 << 20  # bytes; glibc learns from blocks of less than 32 MB


def keep_freed_memory() -> None:
    """Free one large block that nobody has touched.

    By default glibc gives memory back to the system as soon as a few MB at the end of the heap are free, so that after
    every step all pages are faulted in again: a quarter of a step of variational Laplace on a small CNN. From a large
    block that is freed it learns to keep twice its size (M_TRIM_THRESHOLD in mallopt(3)). Elsewhere nothing happens.
    """
    torch.empty(_LARGEST, dtype=torch.uint8)
