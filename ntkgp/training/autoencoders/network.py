"""Encoder and decoder as one network, and data whose targets are the inputs themselves."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

__all__ = ["Autoencoder", "Heads", "reconstructing"]


class Autoencoder(nn.Module):
    """x ↦ z = e(x) ↦ f = d(z): what is trained, and what one draw of a stochastic autoencoder is.

    Args:
        encoder: from inputs to codes, (N, *) -> (N, K) or of any shape that the decoder takes.
        decoder: from codes to what the likelihood takes; it is flattened to C numbers for each input.

    Raises:
        TypeError: if one is not a module.
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        for name, part in (("encoder", encoder), ("decoder", decoder)):
            if not isinstance(part, nn.Module):
                raise TypeError(f"{name} must be a torch.nn.Module, but is a {type(part).__name__}")
        self.encoder, self.decoder = encoder, decoder

    def encode(self, x: Tensor) -> Tensor:  # (N, *) -> (N, K)
        """Return codes."""
        return self.encoder(x)

    def decode(self, z: Tensor) -> Tensor:  # (N, K) -> (N, C)
        """Return what the likelihood takes, flattened."""
        return self.decoder(z).flatten(1)

    def forward(self, x: Tensor) -> Tensor:  # (N, *) -> (N, C)
        """Return the reconstruction."""
        return self.decode(self.encode(x))


class Heads(nn.Module):
    """Two networks of one input, side by side: means, then logarithms of variances, each flattened.

    As a decoder it is for ``HeteroscedasticGaussian``; as an encoder, for a variational autoencoder.
    """

    def __init__(self, mean: nn.Module, log_variance: nn.Module) -> None:
        super().__init__()
        self.mean, self.log_variance = mean, log_variance

    def forward(self, x: Tensor) -> Tensor:  # (N, *) -> (N, 2 T)
        """Return both."""
        return torch.cat([self.mean(x).flatten(1), self.log_variance(x).flatten(1)], 1)


def reconstructing(data: Any) -> Any:
    """Return the same inputs, with themselves for targets; labels, if there are any, are left out.

    Args:
        data: X, a Dataset or a DataLoader; points may be x alone, or (x, anything).

    Raises:
        TypeError: if it is none of these.
    """
    if isinstance(data, DataLoader):
        twin = copy(data)
        twin.collate_fn = _Twice(data.collate_fn)
        return twin
    if isinstance(data, Dataset):
        data = default_collate([data[i] for i in range(len(data))])  # type: ignore[arg-type]
    x = _inputs(data)
    return x, x


@dataclass(frozen=True)
class _Twice:
    """Batches as they were, each as (x, x); an object, so that workers can be sent it."""

    collate: Callable[[Any], Any]

    def __call__(self, points: Any) -> tuple[Tensor, Tensor]:
        x = _inputs(self.collate(points))
        return x, x


def _inputs(batch: Any) -> Tensor:
    x = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(x, Tensor):
        raise TypeError(f"data must be X, a Dataset or a DataLoader of tensors, but has a {type(x).__name__}")
    return x
