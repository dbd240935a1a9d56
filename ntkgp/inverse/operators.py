"""Linear measurements y = A x of images: one small protocol, which other libraries' operators satisfy."""

import math
from abc import ABC, abstractmethod
from copy import deepcopy
from typing import Any, Protocol

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Blur", "Fourier", "Mask", "Matrix", "Measurement", "Physics", "as_measurement"]

_TOGETHER = 64  # images that are measured together
_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


class Physics(Protocol):
    """What an operator must offer; ``deepinv.physics.LinearPhysics`` does. Noise is not part of it."""

    def A(self, x: Tensor) -> Tensor:  # (B, ...) -> (B, ...)
        """Return what is measured of images."""

    def A_adjoint(self, y: Tensor) -> Tensor:  # (B, ...) -> (B, ...)
        """Return Aᵀ y."""


class Measurement(nn.Module, ABC):
    """An operator of ours: images and measurements have known shapes, and further leading dimensions are batches.

    Each shows its adjoint to be one when it is made.
    """

    image_shape: torch.Size
    measured_shape: torch.Size

    def forward(self, x: Tensor) -> Tensor:  # (..., *image_shape) -> (..., *measured_shape)
        """Return A x."""
        self._check("x", x, self.image_shape)
        return self._apply_to(x)

    def A(self, x: Tensor) -> Tensor:
        """Return A x."""
        return self(x)

    def A_adjoint(self, y: Tensor) -> Tensor:  # (..., *measured_shape) -> (..., *image_shape)
        """Return Aᵀ y."""
        self._check("y", y, self.measured_shape)
        return self._adjoint_to(y)

    @abstractmethod
    def _apply_to(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _adjoint_to(self, y: Tensor) -> Tensor: ...

    def _check(self, name: str, v: Tensor, shape: torch.Size) -> None:
        if v.shape[-len(shape) :] != shape:
            raise ValueError(
                f"{name} must have the shape (..., {', '.join(map(str, shape))}), but has {tuple(v.shape)}"
            )
        if (like := next(self.buffers(), v)).is_floating_point() and like.dtype != v.dtype:
            raise TypeError(f"{name} is {v.dtype}, but the operator is {like.dtype}: convert one of them")


class Matrix(Measurement):
    """A matrix over the pixels of an image, row by row.

    Args:
        M: (m, n), a tensor or a LinearOperator.
        image_shape: of n numbers; (n,) by default.
        measured_shape: of m numbers; (m,) by default.
    """

    def __init__(
        self,
        M: Tensor | LinearOperator,
        image_shape: tuple[int, ...] | None = None,
        measured_shape: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        if M.ndim != 2:
            raise ValueError(f"M must have two dimensions, but has shape {tuple(M.shape)}")
        self.image_shape = torch.Size(image_shape or (M.shape[1],))
        if self.image_shape.numel() != M.shape[1]:
            raise ValueError(
                f"image_shape {tuple(self.image_shape)} must have {M.shape[1]} pixels, one for each column of M"
            )
        self.measured_shape = torch.Size(measured_shape or (M.shape[0],))
        if self.measured_shape.numel() != M.shape[0]:
            raise ValueError(
                f"measured_shape {tuple(self.measured_shape)} must have {M.shape[0]} numbers, one for each row of M"
            )
        if isinstance(M, LinearOperator):
            self.M = M
        else:
            self.register_buffer("M", M, persistent=False)
        check_adjoint(self, torch.empty(0, dtype=M.dtype, device=M.device))

    def _apply_to(self, x: Tensor) -> Tensor:
        return _rows(self.M, x.flatten(-len(self.image_shape))).unflatten(-1, self.measured_shape)

    def _adjoint_to(self, y: Tensor) -> Tensor:
        return _rows(self.M.mT, y.flatten(-len(self.measured_shape))).unflatten(-1, self.image_shape)


def _rows(M: Tensor | LinearOperator, x: Tensor) -> Tensor:  # (m, n), (..., n) -> (..., m)
    return (M @ x.reshape(-1, x.shape[-1]).mT).mT.reshape(*x.shape[:-1], M.shape[0])


class Blur(Measurement):
    """Convolution with a kernel; beyond its edge the image is zero.

    Args:
        kernel: (h, w), both odd.
        image_shape: (channels, H, W); every channel is blurred by itself.
    """

    kernel: Tensor

    def __init__(self, kernel: Tensor, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        if kernel.ndim != 2 or not all(size % 2 for size in kernel.shape):
            raise ValueError(f"kernel must have two odd sizes, but has shape {tuple(kernel.shape)}")
        self.register_buffer("kernel", kernel, persistent=False)
        self.image_shape = self.measured_shape = torch.Size(image_shape)
        check_adjoint(self, kernel)

    def _apply_to(self, x: Tensor) -> Tensor:
        return self._convolved(x, self.kernel.flip(0, 1))

    def _adjoint_to(self, y: Tensor) -> Tensor:
        return self._convolved(y, self.kernel)

    def _convolved(self, x: Tensor, kernel: Tensor) -> Tensor:
        flat = x.reshape(-1, 1, *x.shape[-2:])
        padding = [size // 2 for size in kernel.shape]
        return functional.conv2d(flat, kernel[None, None], padding=padding).view_as(x)


class Fourier(Measurement):
    """Some frequencies of an image, orthonormal: real parts, then imaginary parts.

    Args:
        mask: (H, W // 2 + 1), true for frequencies of ``torch.fft.rfft2`` that are measured.
        image_shape: (channels, H, W).
    """

    mask: Tensor

    def __init__(self, mask: Tensor, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.image_shape = torch.Size(image_shape)
        C, H, W = image_shape
        if mask.shape != (H, W // 2 + 1) or mask.dtype != torch.bool:
            raise ValueError(
                f"mask must be boolean with shape {(H, W // 2 + 1)}, but is {mask.dtype}, {tuple(mask.shape)}"
            )
        self.register_buffer("mask", mask, persistent=False)
        self.measured_shape = torch.Size((C, 2, int(mask.sum())))
        check_adjoint(self, torch.empty(0, device=mask.device))

    def _apply_to(self, x: Tensor) -> Tensor:
        z = torch.fft.rfft2(x, norm="ortho")[..., self.mask]
        return torch.stack([z.real, z.imag], dim=-2)

    def _adjoint_to(self, y: Tensor) -> Tensor:
        z = torch.complex(*(part.squeeze(-2) for part in y.split(1, dim=-2)))
        H, W = self.image_shape[-2:]
        full = z.new_zeros(*z.shape[:-1], H, W)
        half = z.new_zeros(*z.shape[:-1], *self.mask.shape)
        half[..., self.mask] = z
        full[..., : self.mask.shape[1]] = half
        # Re ⟨F x, z⟩ = ⟨x, Re Fᴴ z⟩: the frequencies that rfft2 leaves out take no part.
        return torch.fft.ifft2(full, norm="ortho").real


class Mask(Measurement):
    """Some pixels of an image.

    Args:
        mask: (H, W), true for pixels that are seen.
        image_shape: (channels, H, W).
    """

    mask: Tensor

    def __init__(self, mask: Tensor, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.image_shape = torch.Size(image_shape)
        if mask.shape != self.image_shape[-2:] or mask.dtype != torch.bool:
            expected = tuple(self.image_shape[-2:])
            raise ValueError(f"mask must be boolean with shape {expected}, but is {mask.dtype}, {tuple(mask.shape)}")
        self.register_buffer("mask", mask, persistent=False)
        self.measured_shape = torch.Size((self.image_shape[0], int(mask.sum())))
        check_adjoint(self, torch.empty(0, device=mask.device))

    def _apply_to(self, x: Tensor) -> Tensor:
        return x[..., self.mask]

    def _adjoint_to(self, y: Tensor) -> Tensor:
        image = y.new_zeros(*y.shape[:-1], *self.mask.shape)
        image[..., self.mask] = y
        return image


class Foreign(Measurement):
    """An operator of another library, for images like those that its adjoint returns."""

    def __init__(self, physics: Physics, y: Tensor) -> None:  # (B, ...)
        super().__init__()
        self.physics = physics
        self.image_shape, self.measured_shape = physics.A_adjoint(y[:1]).shape[1:], y.shape[1:]

    def _apply_to(self, x: Tensor) -> Tensor:
        return self._batched(self.physics.A, x, self.image_shape)

    def _adjoint_to(self, y: Tensor) -> Tensor:
        return self._batched(self.physics.A_adjoint, y, self.measured_shape)

    @staticmethod
    def _batched(map_: Any, v: Tensor, shape: torch.Size) -> Tensor:
        batch = v.shape[: v.ndim - len(shape)]
        out = map_(v.reshape(-1, *shape))
        return out.reshape(*batch, *out.shape[1:])


def in_double(A: Measurement, y: Tensor) -> Measurement:  # (1, *measured_shape)
    """Return a copy in double precision; of what cannot be converted, the matrix, for problems of moderate size.

    Args:
        A: the operator.
        y: a measurement, for the dtype that A takes.
    """
    if not (isinstance(A, Foreign) or (isinstance(A, Matrix) and isinstance(A.M, LinearOperator))):
        return deepcopy(A).double()
    n = A.image_shape.numel()
    with torch.no_grad():
        pixels = torch.eye(n, dtype=y.dtype, device=y.device).unflatten(1, A.image_shape)
        M = torch.cat([A(part) for part in pixels.split(_TOGETHER)]).flatten(1).mT.double()
    return Matrix(M.contiguous(), A.image_shape, A.measured_shape)


def as_measurement(A: Any, y: Tensor) -> Measurement:  # (B, *measured_shape)
    """Return A as an operator that has shown its adjoint to be one.

    Args:
        A: a :class:`Measurement`, a matrix, or any object with ``A(x)`` and ``A_adjoint(y)``.
        y: measurements, for their shape and dtype.

    Raises:
        TypeError: if A is none of these.
        ValueError: if A_adjoint is not the adjoint of A.
    """
    if isinstance(A, Tensor | LinearOperator):
        found: Measurement = Matrix(A)
    elif isinstance(A, Measurement):
        found = A
    elif callable(getattr(A, "A", None)) and callable(getattr(A, "A_adjoint", None)):
        found = Foreign(A, y)
    else:
        raise TypeError(
            f"A must be a matrix, or an object with A(x) and A_adjoint(y) as deepinv's physics have, but is a "
            f"{type(A).__name__}"
        )
    check_adjoint(found, y)
    return found


def check_adjoint(A: Measurement, like: Tensor) -> None:
    """Compare ⟨A u, v⟩ with ⟨u, Aᵀ v⟩ at random u and v.

    Raises:
        ValueError: if they differ by more than rounding.
    """
    generator = torch.Generator().manual_seed(0)
    u, v = (
        torch.randn(1, *shape, generator=generator, dtype=torch.float64).to(like)
        for shape in (A.image_shape, A.measured_shape)
    )
    with torch.no_grad():
        Au, Av = A.A(u), A.A_adjoint(v)
    left, right = (Au * v).sum().item(), (u * Av).sum().item()
    scale = math.sqrt((Au.square().sum() * v.square().sum()).item()) or 1.0
    error, allowed = abs(left - right) / scale, _TOLERANCE.get(like.dtype, 1e-2)
    if not error <= allowed:
        raise ValueError(
            f"A_adjoint is not the adjoint of A: <A u, v> = {left:.6g} but <u, A_adjoint v> = {right:.6g} at random u "
            f"and v, a relative difference of {error:.2g} where {allowed:.0e} is allowed"
        )
