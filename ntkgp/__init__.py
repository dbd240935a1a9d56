"""Every trained network is locally a Gaussian process."""

from ntkgp import priors
from ntkgp.kernels import LinearizedMean, NTKKernel
from ntkgp.linearization import Linearization

__all__ = ["Linearization", "LinearizedMean", "NTKKernel", "priors"]
