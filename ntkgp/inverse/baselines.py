"""Other error bars for deep image priors, to compare with: dropout, ensembles, and unit noise."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ntkgp.inverse.deep_image_prior import DeepImagePrior, train
from ntkgp.inverse.gaussian_image import BySamples, GaussianImage
from ntkgp.inverse.operators import Measurement

__all__ = ["Draws", "UnitNoise", "ensemble", "mc_dropout"]


@dataclass(frozen=True)
class Draws(BySamples):
    """The Gaussian with the mean and the covariance of some images."""

    samples: Tensor  # (S, *image_shape)

    @cached_property
    def mean(self) -> Tensor:  # (*image_shape)
        """The average image."""
        return self.samples.mean(0)

    def _moves(self) -> Tensor:  # (S, d_x)
        return (self.samples - self.mean).flatten(1).double()


@dataclass(frozen=True)
class UnitNoise(GaussianImage):
    """The image of a network with variance one for every pixel: what a squared error stands for."""

    dip: DeepImagePrior

    @cached_property
    def mean(self) -> Tensor:  # (*image_shape)
        """The network's image."""
        return self.dip.image[0]

    def _covariance(self, patch: Tensor | slice) -> Tensor:  # (n, n)
        return torch.eye(len(torch.arange(self.shape.numel())[patch])).to(self.mean)


def mc_dropout(
    A: Measurement, y: Tensor, net: nn.Module, z: Tensor, num_samples: int = 200, seed: int = 0, **options: Any
) -> Draws:
    """Train a network with dropout, and return images with other channels dropped (Gal & Ghahramani 2016).

    Args:
        A: the operator.
        y: the measurement.
        net: a network with dropout, as ``UNet(dropout=0.05)``.
        z: its input.
        num_samples: how many images.
        seed: of what is dropped.
        options: of :func:`train`.

    Raises:
        ValueError: if the network drops nothing.
    """
    if not any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in net.modules()):
        raise ValueError("net must have dropout with a positive probability, as UNet(dropout=0.05) has")
    if num_samples < 2:
        raise ValueError(f"num_samples must be at least 2, but is {num_samples}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        dip = train(A, y, net, z, **options)
        dip.net.train()
        with torch.no_grad():
            return Draws(torch.cat([dip.net(z) for _ in range(num_samples)]))


def ensemble(
    A: Measurement, y: Tensor, make: Callable[[], nn.Module], z: Tensor, members: int = 5, seed: int = 0, **options: Any
) -> Draws:
    """Train several networks from different initial weights, and return their images (Lakshminarayanan et al. 2017).

    Args:
        A: the operator.
        y: the measurement.
        make: returns a network, with weights from torch's global generator.
        z: the input of all.
        members: how many.
        seed: of the first one's weights; the others have the following.
        options: of :func:`train`.
    """
    if members < 2:
        raise ValueError(f"members must be at least 2, but are {members}")
    images = []
    for i in range(members):
        with torch.random.fork_rng():
            torch.manual_seed(seed + i)
            images.append(train(A, y, make(), z, **options).image)
    return Draws(torch.cat(images))
