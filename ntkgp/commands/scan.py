"""What was measured, from a file: the sinogram, its angles, and perhaps the true image."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ntkgp.commands.arrays import read_arrays

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
    found = read_arrays(path, ("sinogram", "angles"), ("truth",))
    arrays = {name: array.astype(np.float64) for name, array in found.items()}  # whatever numbers the file has
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
