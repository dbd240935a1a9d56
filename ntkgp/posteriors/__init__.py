"""One posterior in two spaces: over functions at the training points, over weights, and structured ways between."""

from ntkgp.posteriors import subnetworks, subsets
from ntkgp.posteriors.base import Posterior
from ntkgp.posteriors.costs import FitPlan
from ntkgp.posteriors.diagonal import DiagonalPosterior
from ntkgp.posteriors.fit import fit
from ntkgp.posteriors.full import FullPosterior
from ntkgp.posteriors.function_space import FunctionSpacePosterior
from ntkgp.posteriors.given import GivenDiagonalPosterior, GivenKroneckerPosterior
from ntkgp.posteriors.inducing import Inducing
from ntkgp.posteriors.kronecker import KroneckerPosterior
from ntkgp.posteriors.low_rank import LowRankPosterior
from ntkgp.posteriors.mixture import Mixture, MixturePrediction
from ntkgp.posteriors.plan import plan
from ntkgp.posteriors.prediction import Prediction
from ntkgp.posteriors.sampled import SampledPosterior
from ntkgp.posteriors.sparse import VariationalPosterior
from ntkgp.posteriors.storage import load

__all__ = [
    "DiagonalPosterior",
    "FitPlan",
    "FullPosterior",
    "FunctionSpacePosterior",
    "GivenDiagonalPosterior",
    "GivenKroneckerPosterior",
    "Inducing",
    "KroneckerPosterior",
    "LowRankPosterior",
    "Mixture",
    "MixturePrediction",
    "Posterior",
    "Prediction",
    "SampledPosterior",
    "VariationalPosterior",
    "fit",
    "load",
    "plan",
    "subnetworks",
    "subsets",
]
