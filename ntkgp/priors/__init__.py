"""m₀ and S₀: Gaussian priors over the parameters of a linearised network."""

from ntkgp.priors.base import LinearPrior, Prior
from ntkgp.priors.conv_filter import ConvFilterGP
from ntkgp.priors.covariance import Covariance, Elementwise, PriorCovariance, Rotated, Separable, Uniform
from ntkgp.priors.diagonal import Diagonal
from ntkgp.priors.g_prior import GPrior
from ntkgp.priors.grouped import Grouped, Isotropic
from ntkgp.priors.kronecker import Kronecker

__all__ = [
    "ConvFilterGP",
    "Covariance",
    "Diagonal",
    "Elementwise",
    "GPrior",
    "Grouped",
    "Isotropic",
    "Kronecker",
    "LinearPrior",
    "Prior",
    "PriorCovariance",
    "Rotated",
    "Separable",
    "Uniform",
]
