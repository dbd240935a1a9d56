"""A folder of results that is there whole or not at all."""

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["whole_folder"]


@contextmanager
def whole_folder(path: Path, files: Collection[str], overwrite: bool) -> Iterator[Path]:
    """Yield an empty folder beside ``path`` that takes its place at the end, or vanishes if anything fails.

    Args:
        path: where results are to be.
        files: all names that results may have. A folder that holds anything else is never replaced.
        overwrite: whether earlier results may be replaced.

    Raises:
        ValueError: if something is at ``path`` that must stay.
    """
    path = path.resolve()
    _check(path, files, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = (path.with_name(f".{path.name}-{os.getpid()}-{age}") for age in ("new", "old"))
    new.mkdir()
    try:
        yield new
        _check(path, files, overwrite)
        if path.exists():
            path.rename(old)
        new.rename(path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _check(path: Path, files: Collection[str], overwrite: bool) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"--output must be a folder, but {path} is a file")
    found = sorted(entry.name for entry in path.iterdir())
    if found and not overwrite:
        raise ValueError(f"--output must be new or empty without --overwrite, but {path} holds {found[0]}")
    if foreign := [name for name in found if name not in files]:
        raise ValueError(f"--overwrite replaces nothing but earlier results, and {path} holds {foreign[0]}")
