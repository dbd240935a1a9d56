"""p(y | f): residual r, curvature Λ and a root of it, moments, samples, and links."""

from ntkgp.likelihoods.base import Expansion, Likelihood, Moments
from ntkgp.likelihoods.blocks import SiteBlocks
from ntkgp.likelihoods.counts import Poisson
from ntkgp.likelihoods.expectations import Expectation, expected
from ntkgp.likelihoods.factorized import FactorizedLikelihood, ScalarLikelihood, TemperedLikelihood
from ntkgp.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian
from ntkgp.likelihoods.labels import Bernoulli, Categorical
from ntkgp.likelihoods.tilted import tilted

__all__ = [
    "LIKELIHOODS",
    "Bernoulli",
    "Categorical",
    "Expansion",
    "Expectation",
    "FactorizedLikelihood",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Moments",
    "Poisson",
    "ScalarLikelihood",
    "SiteBlocks",
    "TemperedLikelihood",
    "expected",
    "tilted",
]

LIKELIHOODS = {
    "gaussian": Gaussian,
    "heteroscedastic": HeteroscedasticGaussian,
    "bernoulli": Bernoulli,
    "categorical": Categorical,
    "poisson": Poisson,
}
