"""The autoencoder as it is usually trained, with noise that is the same everywhere or predicted."""

from collections.abc import Iterator
from copy import deepcopy

import torch

from ntkgp.training.autoencoders.network import Autoencoder
from ntkgp.training.autoencoders.objective import AutoencoderObjective, Draw
from ntkgp.training.maximum import MaximumAPosteriori

__all__ = ["PlainAutoencoder"]


class PlainAutoencoder(AutoencoderObjective, MaximumAPosteriori):
    """One network at its mode; with ``likelihood="heteroscedastic"`` and two heads it predicts its own noise."""

    def draws(self, n: int, generator: torch.Generator | None = None) -> Iterator[Draw]:
        """Yield the network itself, once.

        Args:
            n: at least one.
            generator: not needed.
        """
        yield self._frozen()

    def _frozen(self) -> Autoencoder:
        return deepcopy(self.net).eval().requires_grad_(False)
