"""A Aᵀ and Aᵀ A, one triangle of it: BLAS has a routine, which torch does not offer."""

import ctypes
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

__all__ = ["add_square", "has_square", "mirror", "transpose"]

_NUMBERS = {torch.float32: ("s", ctypes.c_float), torch.float64: ("d", ctypes.c_double)}
_ARGUMENTS = {"syrk": 8, "gemm": 11}  # after two letters
_WORTH_IT = 1 << 24  # multiplications: smaller products take less time than the call
_AT_ONCE = 1 << 39  # multiplications of a call, some seconds: Python does not look at signals in between
_SIDE = 8192  # of a triangle at once: each of OpenBLAS's threads copies its rows to 32 MB, and more of them end beyond
_MIRROR = 500  # side of the squares on the diagonal that are made symmetric at a time
_STRIP = 200  # rows that are transposed at a time: a cache line of each stays in the first cache until it is used up
_LOCK = Lock()  # the number of BLAS's threads is the whole process's


def has_square(A: Tensor, K: Tensor) -> bool:  # (n, p), (n, n)
    """Say whether :func:`add_square` can, and is worth its call: on the CPU, A or Aᵀ as it lies in memory."""
    lies = K.is_contiguous() and (A.is_contiguous() or A.mT.is_contiguous())
    plain = all(t.device.type == "cpu" and t.dtype in _NUMBERS for t in (A, K))
    return lies and plain and A.dtype == K.dtype and A.numel() * len(A) >= _WORTH_IT


def add_square(K: Tensor, A: Tensor, alpha: float, fresh: bool) -> None:  # (n, n), (n, p)
    """Add α A Aᵀ to the lower triangle of K, or write it there if ``fresh``; what is above the diagonal stays.

    n² p multiplications and additions, half of the whole product. Cut into tiles, torch's products come to 1.2 times as
    much work, each at less than full speed: for a LeNet's 3600 x 12,832 Jacobian 1.2 s where this takes .9 s.
    """
    n = len(K)
    with _LOCK, _threads().limit(limits=torch.get_num_threads(), user_api="blas"):
        for start in range(0, n, _SIDE):
            rows = slice(start, min(start + _SIDE, n))
            if start:
                _add_product(K, A, rows, slice(0, start), alpha, fresh)
            _add_product(K, A, rows, rows, alpha, fresh)


def _add_product(K: Tensor, A: Tensor, rows: slice, cols: slice, alpha: float, fresh: bool) -> None:
    """Add α A[rows] A[cols]ᵀ to K[rows, cols]; of a square on the diagonal to its lower triangle."""
    (n, p), (_, number), size = A.shape, _NUMBERS[A.dtype], A.element_size()
    height, width = rows.stop - rows.start, cols.stop - cols.start
    # Rows of torch are Fortran's columns: K is its transpose there, and its lower triangle the upper one.
    first, second, lead, strides = (b"T", b"N", p, (p, 1)) if A.is_contiguous() else (b"N", b"T", n, (1, n))
    target, scale = K.data_ptr() + (rows.start * n + cols.start) * size, ctypes.byref(number(alpha))
    step = max(1, _AT_ONCE // (height * width))
    for start in range(0, p, step):
        left, right = (A.data_ptr() + (side.start * strides[0] + start * strides[1]) * size for side in (cols, rows))
        k, beta = _integer(min(step, p - start)), number(0 if fresh and start == 0 else 1)
        end = ctypes.byref(beta), target, _integer(n)
        if rows == cols:
            _blas("syrk", A.dtype)(b"U", first, _integer(height), k, scale, left, _integer(lead), *end)
        else:
            sides = _integer(width), _integer(height), k
            factors = left, _integer(lead), right, _integer(lead)
            _blas("gemm", A.dtype)(first, second, *sides, scale, *factors, *end)


def mirror(K: Tensor) -> None:  # (n, n)
    """Write the lower triangle of K to the upper one."""
    for start in range(0, len(K), _MIRROR):
        rows = slice(start, start + _MIRROR)
        transpose(K[rows, :start], K[:start, rows])
        here = K[rows, rows]
        here.copy_(here.tril() + here.tril(-1).mT)


def transpose(source: Tensor, target: Tensor) -> None:  # (n, m), (m, n)
    """Write sourceᵀ to the target, which is another part of the same matrix, a strip of rows after the other."""
    for start in range(0, len(source), _STRIP):
        target[:, start : start + _STRIP] = source[start : start + _STRIP].mT


def _integer(value: int) -> Any:
    return ctypes.byref(ctypes.c_int(value))


@cache
def _blas(name: str, dtype: torch.dtype) -> Callable[..., None]:
    """Return SciPy's routine as C has it, which other threads do not wait for; its wrapper for Python holds them up."""
    from scipy.linalg import cython_blas  # slow to import

    capsule = cython_blas.__pyx_capi__[_NUMBERS[dtype][0] + name]
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    kinds = [ctypes.c_char_p] * 2 + [ctypes.c_void_p] * _ARGUMENTS[name]
    return ctypes.CFUNCTYPE(None, *kinds)(pointer(capsule, name_of(capsule)))


@cache
def _threads() -> Any:
    """Return what holds BLAS to torch's number of threads."""
    from threadpoolctl import ThreadpoolController

    _blas("syrk", torch.float32)  # the library has to be there to be found
    return ThreadpoolController()
