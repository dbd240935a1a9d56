"""What every reconstruction with error bars offers: a Gaussian over images."""

import warnings
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
        variance = self._variance()
        if (negative := int((variance < 0).sum())) > 0:
            warnings.warn(
                f"{variance.dtype} cannot resolve the variances of {negative} of {variance.numel()} pixels, which are "
                "tiny beside the prior's: they came out negative, and are set to zero",
                stacklevel=2,
            )
        return variance.clamp(min=0).sqrt().view(self.shape)

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
        for index in _patches(self.shape, patch):
            Sigma = self._patch_covariances(index)
            Sigma = Sigma + noise * torch.eye(index.shape[1]).to(Sigma)
            L, info = torch.linalg.cholesky_ex(Sigma)
            if info.any():
                raise ValueError(
                    "the covariance of a patch is singular to rounding: take smaller patches, or add noise"
                )
            there = left[index].to(L)
            total += torch.distributions.MultivariateNormal(torch.zeros_like(there), scale_tril=L).log_prob(there).sum()
        return float(total) / left.numel()

    def _patch_covariances(self, index: Tensor) -> Tensor:  # (m, n) -> (m, n, n)
        """Return the covariances of m patches of n pixels each."""
        return torch.stack([self._covariance(patch) for patch in index])

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

    def _patch_covariances(self, index: Tensor) -> Tensor:  # (m, n) -> (m, n, n)
        X = self._moves()[:, index].transpose(0, 1)  # (m, S, n)
        return X.mT @ X / X.shape[1]


def _patches(shape: torch.Size, size: int) -> Iterator[Tensor]:  # (m, n) each
    """Yield the numbers of the pixels of squares, those of one size together: at the edges they may be smaller.

    Channels are apart; an image with one dimension falls into runs.
    """
    numbers = torch.arange(shape.numel()).view(-1, *(shape[-2:] if len(shape) > 1 else (1, *shape)))
    parts = [part.flatten(1) for rows in numbers.split(size, dim=1) for part in rows.split(size, dim=2)]
    for n in sorted({part.shape[1] for part in parts}):
        yield torch.cat([part for part in parts if part.shape[1] == n])
