"""Training with uncertainty: a Gaussian over the weights, or its prior, is learnt, not found after the fact."""

from ntkgp.training import autoencoders
from ntkgp.training.autoencoders import LaplacianAutoencoder
from ntkgp.training.evidence import EvidenceTraining
from ntkgp.training.maximum import MaximumAPosteriori
from ntkgp.training.mean_field import MeanFieldVI
from ntkgp.training.objective import Terms, WeightObjective
from ntkgp.training.variational_laplace import VariationalLaplace

__all__ = [
    "EvidenceTraining",
    "LaplacianAutoencoder",
    "MaximumAPosteriori",
    "MeanFieldVI",
    "Terms",
    "VariationalLaplace",
    "WeightObjective",
    "autoencoders",
]
