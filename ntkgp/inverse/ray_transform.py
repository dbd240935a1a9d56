"""Computed tomography: the ray transform of an image, its adjoint and filtered back-projection."""

import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from ntkgp.inverse.fbp import filtered_back_projection
from ntkgp.inverse.geometry import Fan, Geometry, Parallel
from ntkgp.inverse.operators import Measurement, check_adjoint
from ntkgp.inverse.projector import joseph
from ntkgp.inverse.sparse import Sparse, sparse_product

__all__ = ["RayTransform"]

Angles = int | Tensor | Sequence[float]


class RayTransform(Measurement):
    """Line integrals of images (..., 1, N, N) as sinograms (..., 1, angles, detectors), in units of ``pixel_size``.

    See :meth:`parallel` and :meth:`fan`. The matrix is sparse, and its transpose is stored beside it.

    Args:
        geometry: where rays run.
        image_size: N.
        pixel_size: the length of a pixel's sides.
        dtype: of the matrix; torch's default if None.

    Raises:
        ValueError: if the detector does not see the circle inscribed in the image.
    """

    def __init__(
        self, geometry: Geometry, image_size: int, pixel_size: float = 1.0, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        _check_view(geometry, image_size * pixel_size / 2)
        self.geometry, self.image_size, self.pixel_size = geometry, image_size, pixel_size
        M = joseph(geometry.rays(), image_size, pixel_size, dtype or torch.get_default_dtype())
        for name, part in (("M", M), ("Mt", M.transposed())):
            for field in ("values", "rows", "columns"):
                self.register_buffer(f"{name}_{field}", getattr(part, field), persistent=False)
        self.image_shape = torch.Size((1, image_size, image_size))
        self.measured_shape = torch.Size((1, len(geometry.angles), geometry.detectors))
        check_adjoint(self, M.values)

    @classmethod
    def parallel(
        cls,
        image_size: int,
        angles: Angles,
        detectors: int | None = None,
        detector_spacing: float | None = None,
        pixel_size: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return the transform of parallel beams.

        Args:
            image_size: pixels in a row and in a column.
            angles: how many, spread evenly over [0, π), or which, in radians.
            detectors: pixels of the detector; by default as many as see the image's diagonal.
            detector_spacing: their distance; that of the image's pixels by default.
            pixel_size: of the image.
            dtype: of the matrix; torch's default if None.
        """
        _positive(image_size=image_size, pixel_size=pixel_size)
        spacing = pixel_size if detector_spacing is None else detector_spacing
        _positive(detector_spacing=spacing)
        if detectors is None:
            detectors = math.ceil(math.sqrt(2) * image_size * pixel_size / spacing)
        _positive(detectors=detectors)
        return cls(Parallel(_radians(angles, math.pi), detectors, spacing), image_size, pixel_size, dtype)

    @classmethod
    def fan(
        cls,
        image_size: int,
        angles: Angles,
        source_origin: float,
        source_detector: float,
        detectors: int,
        detector_spacing: float,
        pixel_size: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return the transform of a fan of rays onto a flat detector, perpendicular to the central ray.

        Args:
            image_size: pixels in a row and in a column.
            angles: how many, spread evenly over [0, 2π), or which, in radians; at zero the source is below the image.
            source_origin: from the source to the centre of rotation.
            source_detector: from the source to the detector.
            detectors: pixels of the detector.
            detector_spacing: their distance.
            pixel_size: of the image, in the same unit as all lengths.
            dtype: of the matrix; torch's default if None.
        """
        _positive(
            image_size=image_size, pixel_size=pixel_size, source_origin=source_origin,
            source_detector=source_detector, detectors=detectors, detector_spacing=detector_spacing,
        )  # fmt: skip
        if source_origin <= (half := image_size * pixel_size / math.sqrt(2)):
            raise ValueError(
                f"source_origin must be beyond the image's corners at {half:.4g}, but is {source_origin:.4g}"
            )
        geometry = Fan(_radians(angles, 2 * math.pi), detectors, detector_spacing, source_origin, source_detector)
        return cls(geometry, image_size, pixel_size, dtype)

    @property
    def matrix(self) -> Sparse:
        """The transform of the pixels, row by row."""
        M, Mt = (Sparse(*(getattr(self, f"{name}_{f}") for f in ("rows", "columns", "values"))) for name in ("M", "Mt"))
        return Sparse(M.rows, M.columns, M.values, Mt)

    def _apply_to(self, x: Tensor) -> Tensor:
        return sparse_product(self.matrix, x.flatten(-2)).unflatten(-1, self.measured_shape[1:])

    def _adjoint_to(self, y: Tensor) -> Tensor:
        return sparse_product(self.matrix.transposed(), y.flatten(-2)).unflatten(-1, self.image_shape[1:])

    def fbp(self, y: Tensor) -> Tensor:  # (..., 1, A, D) -> (..., 1, N, N)
        """Return the filtered back-projection; see :func:`filtered_back_projection`."""
        self._check("y", y, self.measured_shape)
        return filtered_back_projection(y, self.geometry, self.image_size, self.pixel_size)


def _radians(angles: Angles, turn: float) -> Tensor:  # (A,)
    if isinstance(angles, int):
        _positive(angles=angles)
        return torch.arange(angles, dtype=torch.float64) * (turn / angles)
    found = torch.as_tensor(angles, dtype=torch.float64)
    if found.ndim != 1 or len(found) == 0:
        raise ValueError(f"angles must be a number or a list of angles, but has shape {tuple(found.shape)}")
    if not found.isfinite().all():
        raise ValueError("angles must be finite, but some are not")
    return found


def _positive(**arguments: float) -> None:
    for name, value in arguments.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, but is {value}")


def _check_view(geometry: Geometry, radius: float) -> None:
    needed, there = geometry.needed(radius), geometry.detectors * geometry.spacing / 2
    if there < needed * (1 - 1e-9):
        raise ValueError(
            f"the detector does not see the image's inscribed circle: its half width is {there:.4g}, {needed:.4g} "
            f"would be needed, {needed - there:.4g} is missing on either side"
        )
