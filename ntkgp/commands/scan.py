"""What was measured, from a file: the sinogram, its angles, and perhaps the true image."""

import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

__all__ = ["Scan", "read_scan"]

_TURN = {"radians": 2 * math.pi, "degrees": 360.0}


@dataclass(frozen=True)
class Scan:
    """A sinogram and what belongs to it."""

    y: Tensor  # (1, 1, angles, detectors)
    angles: Tensor  # radians, (angles,)
    truth: Tensor | None  # (1, N, N)


def read_scan(path: Path, image_size: int, unit: Literal["radians", "degrees"], dtype: torch.dtype) -> Scan:
    """Read an ``.npz`` file with ``sinogram`` (angles x detectors), ``angles``, and ``truth`` (N x N) if it is known.

    Args:
        path: of the file.
        image_size: N.
        unit: of the angles.
        dtype: of sinogram and truth.

    Raises:
        ValueError: if the file is not there or not one of these, or an array is not what it should be.
    """
    arrays = _arrays(path)
    y, angles, truth = arrays["sinogram"], arrays["angles"], arrays.get("truth")
    if y.ndim != 2 or not y.size:
        raise ValueError(f"sinogram must have the shape (angles, detectors), but has {y.shape}")
    if angles.shape != y.shape[:1]:
        raise ValueError(
            f"angles must have the shape {y.shape[:1]}, one for each row of the sinogram, but has {angles.shape}"
        )
    if truth is not None and truth.shape != (image_size, image_size):
        raise ValueError(f"truth must have the shape {(image_size, image_size)} of --image-size, but has {truth.shape}")
    turn = _TURN[unit]
    if (span := np.ptp(angles)) > turn * (1 + 1e-6):
        raise ValueError(
            f"angles must span at most a full turn of {turn:.4g} {unit}, but span {span:.4g}: see --angles-unit"
        )
    return Scan(
        torch.as_tensor(y, dtype=dtype)[None, None],
        torch.as_tensor(angles) * (2 * math.pi / turn),
        None if truth is None else torch.as_tensor(truth, dtype=dtype)[None],
    )


def _arrays(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise ValueError(f"the sinogram's file {path} does not exist")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} must be an .npz file, but is not, or was cut short")
    try:
        with np.load(path) as file:
            names = file.files
            arrays = {name: file[name] for name in ("sinogram", "angles", "truth") if name in names}
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for name in ("sinogram", "angles"):
        if name not in arrays:
            raise ValueError(f"{path} must hold {name}, but holds {', '.join(names) or 'nothing'}")
    return {name: _numbers(name, array) for name, array in arrays.items()}


def _numbers(name: str, array: np.ndarray) -> np.ndarray:
    """Return an array in double precision, whatever numbers the file has."""
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} must hold real numbers, but has dtype {array.dtype}")
    if wrong := int((~np.isfinite(array)).sum()):
        raise ValueError(f"{name} must be finite, but {wrong} of {array.size} numbers are not")
    return array.astype(np.float64)
