"""Room for large results, and for what comes again and again."""

import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import RLock

import torch
from torch import Tensor

__all__ = ["contiguous", "empty", "keep_freed_memory"]

_WORTH_IT = 32 << 20  # bytes; smaller blocks come from a heap whose pages are there already
_HUGE_PAGE = 2 << 20
_LARGEST_LEARNT = 31 << 20  # bytes; glibc learns from blocks of less than 32 MB
_SPARE_BYTES = 1 << 30  # what blocks that were freed may hold, all together
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14, which Python's mmap does not name yet


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return an uninitialised tensor with the dtype and device of ``like``.

    A large block on the CPU comes fresh from the operating system, which hands it out in pages of 4 KB at the first
    touch of each: for a Gram matrix that costs half as much as computing it. Pages of 2 MB, touched beforehand by all
    threads, take a third of that. Where the system does not know them, nothing is lost. A block that is freed is there
    for the next result of its size.
    """
    size = torch.Size(shape).numel() * like.element_size()
    if like.device.type != "cpu" or size < _WORTH_IT or not hasattr(mmap, "MADV_HUGEPAGE"):
        return like.new_empty(shape)
    block = _SPARE.take(size) or _fresh(size)
    view = memoryview(block)  # the tensor's storage is what holds it
    weakref.finalize(view, _SPARE.give, block).atexit = False
    return torch.frombuffer(view, dtype=like.dtype).view(shape)


def contiguous(x: Tensor) -> Tensor:
    """Return x without gaps, itself if it has none; a copy is made as :func:`empty` makes room."""
    return x if x.is_contiguous() else empty(x.shape, x).copy_(x)


def _fresh(size: int) -> mmap.mmap:
    """Return a block whose pages are there."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        block.madvise(mmap.MADV_HUGEPAGE)
        threads = torch.get_num_threads()
        part = -(-size // (threads * _HUGE_PAGE)) * _HUGE_PAGE
        with ThreadPoolExecutor(threads) as pool:
            starts = range(0, size, part)
            list(pool.map(lambda start: block.madvise(_POPULATE_WRITE, start, min(part, size - start)), starts))
    return block


class _Spare:
    """Blocks that nothing uses any more, the last freed last; the first go back to the system when they are too many.

    Garbage is collected at any time, so a block may be given while another is taken; then at worst it is not kept.
    """

    def __init__(self) -> None:
        self._blocks: tuple[mmap.mmap, ...] = ()
        self._lock = RLock()

    def take(self, size: int) -> mmap.mmap | None:
        """Return a block of this size, if there is one."""
        with self._lock:
            blocks = self._blocks
            found = next((block for block in blocks if len(block) == size), None)
            self._blocks = tuple(block for block in blocks if block is not found)
            return found

    def give(self, block: mmap.mmap) -> None:
        """Keep a block, if there is room; the system may take its pages wherever it lacks some (MADV_FREE)."""
        if len(block) > _SPARE_BYTES:
            return
        with suppress(AttributeError, OSError):
            block.madvise(mmap.MADV_FREE)
        with self._lock:
            blocks = (*self._blocks, block)
            while sum(map(len, blocks)) > _SPARE_BYTES:
                blocks = blocks[1:]
            self._blocks = blocks


_SPARE = _Spare()


def keep_freed_memory() -> None:
    """Free one large block that nobody has touched, so that the C library keeps what is freed from now on.

    By default glibc gives memory back to the system as soon as a few MB at the end of the heap are free, so that the
    next step of training, or the next Gram matrix, faults the same pages in again: a quarter of a step of variational
    Laplace on a small CNN, 5 of 85 ms for 4000 rows of an MLP's kernel. From a large block that is freed it learns to
    keep twice its size (M_TRIM_THRESHOLD in mallopt(3)). Elsewhere nothing happens.
    """
    torch.empty(_LARGEST_LEARNT, dtype=torch.uint8, device="cpu")
