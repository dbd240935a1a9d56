"""Every trained network is locally a Gaussian process."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ntkgp import curvature, likelihoods, posteriors, priors
from ntkgp.kernels import LinearizedMean, MultiOutputVariationalStrategy, NTKKernel
from ntkgp.linearization import Linearization
from ntkgp.posteriors import Posterior, Prediction, fit, load, plan

if TYPE_CHECKING:
    from ntkgp import interop, inverse, report, training
    from ntkgp.inverse import reconstruct

__all__ = [
    "Linearization",
    "LinearizedMean",
    "MultiOutputVariationalStrategy",
    "NTKKernel",
    "Posterior",
    "Prediction",
    "curvature",
    "fit",
    "interop",
    "inverse",
    "likelihoods",
    "load",
    "plan",
    "posteriors",
    "priors",
    "reconstruct",
    "report",
    "training",
]

_LATER = ("interop", "inverse", "report", "training")  # imported when they are first asked for


def __getattr__(name: str) -> Any:
    if name == "reconstruct":
        return import_module("ntkgp.inverse").reconstruct
    if name in _LATER:
        return import_module(f"ntkgp.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
