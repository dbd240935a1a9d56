"""A network from the command line: a function that makes it, by name, and its weights, from a file."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

__all__ = ["make_network"]


def make_network(name: str, weights: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """Import ``package.module:make_net``, call it without arguments, and give the network its weights.

    The current directory comes first on the path, as for ``python -m``.

    Args:
        name: of the function, or of a class.
        weights: a safetensors file with all parameters and buffers.
        dtype: to convert the network to; by default it stays as it was made.

    Raises:
        ImportError: if there is no such function, or importing it fails.
        ValueError: if it fails or returns no module, or the weights are not there, not safetensors, or of others.
    """
    if not weights.is_file():
        raise ValueError(f"weights: file {weights} does not exist")
    with _current_directory_first():
        net = _made(name)
    net = net if dtype is None else net.to(dtype)
    try:
        missing, unexpected = load_model(net, weights, strict=False)
    except SafetensorError as error:
        raise ValueError(
            f"weights: {weights} must be a safetensors file, but is not, or was cut short ({error}): write it with "
            "safetensors.torch.save_model(net, path)"
        ) from error
    except RuntimeError as error:
        raise ValueError(f"weights: {weights} does not fit {name}: {error}") from error
    if missing or unexpected:
        lacks = f"lacks {', '.join(sorted(missing))}" if missing else ""
        more = f"has {', '.join(sorted(unexpected))}, which the network has not" if unexpected else ""
        raise ValueError(f"weights: {weights} does not fit {name}: it {' and '.join(filter(None, (lacks, more)))}")
    return net


def _made(name: str) -> nn.Module:
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ValueError(f"network must be given as package.module:make_net, but is {name!r}")
    try:
        found = import_module(module)
    except Exception as error:
        raise ImportError(
            f"{module} cannot be imported, neither from {os.getcwd()} nor as an installed package: "
            f"{type(error).__name__}: {error}"
        ) from error
    make = getattr(found, function, None)
    if not callable(make) or isinstance(make, nn.Module):
        what = "nothing of that name" if make is None else f"a {type(make).__name__}"
        raise ImportError(f"{name} must be a function that returns the network, but {module} has {what}")
    try:
        net = make()
    except Exception as error:
        raise ValueError(f"{name}() failed: {type(error).__name__}: {error}") from error
    if not isinstance(net, nn.Module):
        raise ValueError(f"{name}() must return a torch.nn.Module, but returns a {type(net).__name__}")
    return net


@contextmanager
def _current_directory_first() -> Iterator[None]:
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
