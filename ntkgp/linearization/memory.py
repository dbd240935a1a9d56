"""Room for large results."""

import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

__all__ = ["empty"]

_WORTH_IT = 32 << 20  # bytes; smaller blocks come from a heap whose pages are there already
_HUGE_PAGE = 2 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14, which Python's mmap does not name yet


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return an uninitialised tensor with the dtype and device of ``like``.

    A large block on the CPU comes fresh from the operating system, which hands it out in pages of 4 KB at the first
    touch of each: for a Gram matrix that costs half as much as computing it. Pages of 2 MB, touched beforehand by all
    threads, take a third of that. Where the system does not know them, nothing is lost.
    """
    size = torch.Size(shape).numel() * like.element_size()
    if like.device.type != "cpu" or size < _WORTH_IT or not hasattr(mmap, "MADV_HUGEPAGE"):
        return like.new_empty(shape)
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        buffer.madvise(mmap.MADV_HUGEPAGE)
        threads = torch.get_num_threads()
        part = -(-size // (threads * _HUGE_PAGE)) * _HUGE_PAGE
        with ThreadPoolExecutor(threads) as pool:
            starts = range(0, size, part)
            list(pool.map(lambda start: buffer.madvise(_POPULATE_WRITE, start, min(part, size - start)), starts))
    return torch.frombuffer(buffer, dtype=like.dtype).view(shape)
