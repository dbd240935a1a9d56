"""Data for a network from ``.npz`` files with ``X`` and ``y``."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ntkgp.commands.arrays import read_arrays
from ntkgp.likelihoods import Gaussian, HeteroscedasticGaussian, Likelihood

__all__ = ["read_inputs", "read_points"]


def read_points(path: Path, net: nn.Module, likelihood: Likelihood) -> tuple[Tensor, Tensor]:
    """Return X and y, as network and likelihood take them.

    Raises:
        ValueError: if the file is not what it should be.
    """
    arrays = read_arrays(path, ("X", "y"))
    return _inputs(path, arrays["X"], net), _targets(path, arrays, net, likelihood)


def read_inputs(path: Path, net: nn.Module, likelihood: Likelihood) -> tuple[Tensor, Tensor | None]:
    """Return X, and y if the file has it."""
    arrays = read_arrays(path, ("X",), ("y",))
    y = _targets(path, arrays, net, likelihood) if "y" in arrays else None
    return _inputs(path, arrays["X"], net), y


def _inputs(path: Path, X: np.ndarray, net: nn.Module) -> Tensor:
    """Return numbers in the network's dtype; whole numbers are tokens if it has an embedding."""
    if X.ndim == 0 or not X.size:
        raise ValueError(f"{path}: X must hold at least one point, but has shape {X.shape}")
    tokens = X.dtype.kind in "iu" and any(isinstance(module, nn.Embedding) for module in net.modules())
    x = torch.as_tensor(X).to(torch.int64 if tokens else next(net.parameters()).dtype)
    _try(path, net, x[:1])
    return x


def _try(path: Path, net: nn.Module, x: Tensor) -> None:
    """Feed the network a point, so that a wrong shape is told of the file it is in."""
    training = net.training
    try:
        with torch.no_grad():
            net.eval()(x)
    except Exception as error:
        raise ValueError(
            f"{path}: the network cannot take a point of X, which has shape {tuple(x.shape[1:])} and dtype {x.dtype}: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        net.train(training)


def _targets(path: Path, arrays: dict[str, np.ndarray], net: nn.Module, likelihood: Likelihood) -> Tensor:
    X, y = arrays["X"], arrays["y"]
    if y.ndim == 0 or len(y) != len(X):
        raise ValueError(f"{path}: y must hold a target for each of {len(X)} points of X, but has shape {y.shape}")
    continuous = y.dtype.kind == "f" or isinstance(likelihood, Gaussian | HeteroscedasticGaussian)
    return torch.as_tensor(y).to(next(net.parameters()).dtype if continuous else torch.int64)
