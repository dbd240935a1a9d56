"""GPyTorch citizens: the tangent kernel, the linear model's mean, and inducing values of several outputs."""

from ntkgp.kernels.mean import LinearizedMean
from ntkgp.kernels.ntk import NTKKernel
from ntkgp.kernels.strategy import MultiOutputVariationalStrategy

__all__ = ["LinearizedMean", "MultiOutputVariationalStrategy", "NTKKernel"]
