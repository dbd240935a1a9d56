"""GPyTorch citizens: the tangent kernel and the linear model's mean."""

from ntkgp.kernels.mean import LinearizedMean
from ntkgp.kernels.ntk import NTKKernel

__all__ = ["LinearizedMean", "NTKKernel"]
