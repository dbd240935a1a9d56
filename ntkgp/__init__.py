"""Every trained network is locally a Gaussian process."""

from ntkgp import curvature, interop, inverse, likelihoods, posteriors, priors, report, training
from ntkgp.inverse import reconstruct
from ntkgp.kernels import LinearizedMean, MultiOutputVariationalStrategy, NTKKernel
from ntkgp.linearization import Linearization
from ntkgp.posteriors import Posterior, Prediction, fit, load, plan

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
