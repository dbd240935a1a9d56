"""Which weights are random while the rest stay at θ*."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ntkgp.likelihoods import Likelihood
from ntkgp.posteriors.diagonal import DiagonalPosterior
from ntkgp.posteriors.model import LinearModel
from ntkgp.priors import Prior

__all__ = ["LargestVariance", "RandomWeights", "Subnetwork", "SwagVariance"]


@dataclass(frozen=True)
class Subnetwork(ABC):
    """Choose ``size`` weights."""

    size: int

    def __call__(self, model: LinearModel, prior: Prior, likelihood: Likelihood) -> Tensor:  # (size,)
        """Return their indices in order.

        Raises:
            ValueError: if there are fewer.
        """
        if not 1 <= self.size <= model.lin.num_params:
            raise ValueError(f"subnetwork must be from 1 to {model.lin.num_params} weights, but is {self.size}")
        scores = self._scores(model, prior, likelihood)
        return scores.topk(self.size).indices.sort().values

    @abstractmethod
    def _scores(self, model: LinearModel, prior: Prior, likelihood: Likelihood) -> Tensor:  # (P,)
        """Return what the chosen weights have most of."""


@dataclass(frozen=True)
class LargestVariance(Subnetwork):
    """The largest marginal variances under the diagonal Laplace approximation (Daxberger et al. 2021)."""

    def _scores(self, model: LinearModel, prior: Prior, likelihood: Likelihood) -> Tensor:
        covariances = DiagonalPosterior(model, prior, likelihood)._now()
        sizes = zip(model.lin.layout.names, model.lin.layout.sizes, strict=True)
        return torch.cat([covariances[name].diagonal(size) for name, size in sizes])


@dataclass(frozen=True)
class SwagVariance(Subnetwork):
    """The largest variances of the weights along an optimiser's path (SWAG).

    Args:
        size: how many weights.
        variances: of every weight, (P,), from iterates after training.
    """

    variances: Tensor

    def _scores(self, model: LinearModel, prior: Prior, likelihood: Likelihood) -> Tensor:
        if self.variances.shape != (model.lin.num_params,):
            raise ValueError(
                f"variances must have shape ({model.lin.num_params},), but has {tuple(self.variances.shape)}"
            )
        return self.variances


@dataclass(frozen=True)
class RandomWeights(Subnetwork):
    """Drawn uniformly."""

    seed: int = 0

    def _scores(self, model: LinearModel, prior: Prior, likelihood: Likelihood) -> Tensor:
        return torch.rand(model.lin.num_params, generator=torch.Generator().manual_seed(self.seed))
