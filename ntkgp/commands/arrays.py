"""Arrays from .npz files, checked: what is wrong is named by file and array."""

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

__all__ = ["read_arrays"]


def read_arrays(path: Path, needed: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Return arrays of finite numbers by name, as the file has them.

    Args:
        path: of an ``.npz`` file.
        needed: arrays that it must hold.
        optional: arrays that are read if it holds them.

    Raises:
        ValueError: if the file is not there, not an .npz file, lacks an array, or one does not hold finite numbers.
    """
    if not path.is_file():
        raise ValueError(f"file {path} does not exist")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} must be an .npz file, but is not, or was cut short")
    try:
        with np.load(path) as file:
            names = file.files
            arrays = {name: file[name] for name in (*needed, *optional) if name in names}
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for name in needed:
        if name not in arrays:
            raise ValueError(f"{path} must hold {name}, but holds {', '.join(names) or 'nothing'}")
    for name, array in arrays.items():
        _check(name, array)
    return arrays


def _check(name: str, array: np.ndarray) -> None:
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} must hold real numbers, but has dtype {array.dtype}")
    if wrong := int((~np.isfinite(array)).sum()):
        raise ValueError(f"{name} must be finite, but {wrong} of {array.size} numbers are not")
