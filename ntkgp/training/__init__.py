"""Training with uncertainty: a Gaussian over the weights is learnt, not found after the fact."""

from ntkgp.training.maximum import MaximumAPosteriori
from ntkgp.training.mean_field import MeanFieldVI
from ntkgp.training.objective import Terms, WeightObjective
from ntkgp.training.variational_laplace import VariationalLaplace

__all__ = ["MaximumAPosteriori", "MeanFieldVI", "Terms", "VariationalLaplace", "WeightObjective"]
