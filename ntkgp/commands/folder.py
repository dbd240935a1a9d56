"""Results that are there whole or not at all: a folder, or a file."""

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["check_file", "check_folder", "whole_file", "whole_folder"]


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
    check_folder(path, files, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = (path.with_name(f".{path.name}-{os.getpid()}-{age}") for age in ("new", "old"))
    try:
        new.mkdir()
        yield new
        check_folder(path, files, overwrite)
        if path.exists():
            path.rename(old)
        new.rename(path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def check_folder(path: Path, files: Collection[str], overwrite: bool) -> None:
    """Refuse a place where a folder cannot go, with the arguments of :func:`whole_folder`."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"--output must be a folder, but {path} is a file")
    found = sorted(entry.name for entry in path.iterdir())
    if found and not overwrite:
        raise ValueError(f"--output must be new or empty without --overwrite, but {path} holds {found[0]}")
    if foreign := [name for name in found if name not in files]:
        raise ValueError(f"--overwrite replaces nothing but earlier results, and {path} holds {foreign[0]}")


@contextmanager
def whole_file(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield the name of a file beside ``path`` that takes its place at the end, or vanishes if anything fails.

    Args:
        path: where the file is to be.
        overwrite: whether an earlier one may be replaced.

    Raises:
        ValueError: if something is at ``path`` that must stay.
    """
    path = path.resolve()
    check_file(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{os.getpid()}-{path.name}")  # with the same suffix, as some writers look at it
    try:
        yield new
        check_file(path, overwrite)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def check_file(path: Path, overwrite: bool) -> None:
    """Refuse a place where a file cannot go, with the arguments of :func:`whole_file`."""
    if path.is_dir():
        raise ValueError(f"--output must be a file, but {path} is a folder")
    if path.exists() and not overwrite:
        raise ValueError(f"--output must be new without --overwrite, but {path} exists")
