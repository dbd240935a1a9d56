"""Maximum a posteriori: what the variational objectives are compared with, on the same loop."""

import torch
from torch import Tensor

from ntkgp.linearization.inputs import Input
from ntkgp.posteriors import DiagonalPosterior, Posterior
from ntkgp.posteriors.model import LinearModel
from ntkgp.priors import Prior
from ntkgp.training.objective import Terms, WeightObjective

__all__ = ["MaximumAPosteriori"]


class MaximumAPosteriori(WeightObjective):
    r"""log p(y | μ) − β ½ ‖μ / s‖²: plain training, with weight decay β / (N s²) on the mean loss.

    It ends in the diagonal Laplace posterior at μ, whose curvature is computed when it is first asked for;
    ``predict(x, predictive="map")`` is the network alone and does not ask.
    """

    def terms(self, x: Input, y: Tensor, generator: torch.Generator | None = None) -> Terms:
        """Return the parts of the objective for a minibatch.

        Args:
            x: S inputs.
            y: their targets.
            generator: not needed.
        """
        f = self.outputs(x)
        log_prob = self.likelihood.log_prob(self._targets(y, f), f).mean()
        divergence = (self.mean() / self.prior_std).square().sum() / 2
        return Terms(log_prob, torch.zeros_like(log_prob), divergence / self._size(), self.beta)

    def posterior_of(self, model: LinearModel, prior: Prior) -> Posterior:
        """Return the diagonal Laplace posterior."""
        return DiagonalPosterior(model, prior, model.likelihood)
