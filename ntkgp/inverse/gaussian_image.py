"""What every reconstruction with error bars offers: a Gaussian over images."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["BySamples", "GaussianImage"]


class GaussianImage(ABC):
    """N(mean, Σ) over the pixels of an image."""

    @property
    @abstractmethod
    def mean(self) -> Tensor:  # (*image_shape)
        """The mean image."""

    @abstractmethod
    def _covariance(self, patch: Tensor | slice) -> Tensor:  # (n, n)
        """Return the covariance of some pixels."""

    @property
    def shape(self) -> torch.Size:
        """Of the image."""
        return self.mean.shape

    @property
    def std(self) -> Tensor:  # (*image_shape)
        """The standard deviation of each pixel, without the noise of measurements."""
        return self._variance().sqrt().view(self.shape)

    def covariance(self, patch: Tensor | None = None) -> Tensor:  # (n, n)
        """Return the covariance of some pixels.

        Args:
            patch: which, numbered row by row; all by default.
        """
        return self._covariance(slice(None) if patch is None else patch)

    def log_likelihood(self, x: Tensor, patch: int = 1, noise: float = 0.0) -> float:  # (*image_shape)
        """Return log N(x) per pixel, patch by patch.

        Args:
            x: the true image.
            patch: pixels on a side of the squares that are independent of each other.
            noise: a variance to add to every pixel's.

        Raises:
            ValueError: if x has another shape, or the covariance of a patch is singular.
        """
        if x.shape != self.shape:
            raise ValueError(f"x must have the shape {tuple(self.shape)}, but has {tuple(x.shape)}")
        if patch < 1:
            raise ValueError(f"patch must be at least 1, but is {patch}")
        left, total = (x.to(self.mean) - self.mean).flatten(), 0.0
        for which in _patches(self.shape, patch):
            Sigma = self.covariance(which)
            Sigma = Sigma + noise * torch.eye(len(which)).to(Sigma)
            L, info = torch.linalg.cholesky_ex(Sigma)
            if info.item():
                raise ValueError(
                    "the covariance of a patch is singular to rounding: take smaller patches, or add noise"
                )
            normal = torch.distributions.MultivariateNormal(torch.zeros_like(left[which]), scale_tril=L)
            total += normal.log_prob(left[which]).item()
        return total / left.numel()

    def _variance(self) -> Tensor:  # (d_x,)
        return self._covariance(slice(None)).diagonal()


class BySamples(GaussianImage):
    """Covariances by averages over centred images."""

    @abstractmethod
    def _moves(self) -> Tensor:  # (S, d_x)
        """Return images less their mean."""

    def _variance(self) -> Tensor:  # (d_x,)
        return self._moves().square().mean(0)

    def _covariance(self, patch: Tensor | slice) -> Tensor:  # (n, n)
        X = self._moves()[:, patch]
        return X.mT @ X / len(X)


def _patches(shape: torch.Size, size: int) -> Iterator[Tensor]:
    """Yield the numbers of the pixels of each square, channel by channel; those at the edges may be smaller."""
    numbers = torch.arange(shape.numel()).view(-1, *shape[-2:])
    for channel in numbers:
        for rows in channel.split(size, dim=0):
            for part in rows.split(size, dim=1):
                yield part.flatten()
