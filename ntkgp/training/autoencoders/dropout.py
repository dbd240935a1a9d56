"""An autoencoder with dropout that stays on: each mask is a network."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ntkgp.training.autoencoders.network import Autoencoder
from ntkgp.training.autoencoders.objective import Draw
from ntkgp.training.autoencoders.plain import PlainAutoencoder

__all__ = ["DropoutAutoencoder"]

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class DropoutAutoencoder(PlainAutoencoder):
    """A network with dropout, which stays on when it is asked (Gal & Ghahramani 2016).

    Raises:
        ValueError: if there is no dropout in it.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not any(isinstance(module, _DROPOUT) for module in self.net.modules()):
            raise ValueError("encoder and decoder must have dropout layers, but there are none")

    def draws(self, n: int, generator: torch.Generator | None = None) -> Iterator[Draw]:
        """Yield n networks with masks of their own, for each input anew.

        Args:
            n: how many.
            generator: by default seed 0, so that they repeat.
        """
        net = self._frozen()
        for module in net.modules():
            if isinstance(module, _DROPOUT):
                module.train()
        generator = generator or torch.Generator().manual_seed(0)
        for _ in range(n):
            yield _Masked(net, generator)


class _Masked:
    """A network whose masks come from a generator, though torch's dropout knows only the global one."""

    def __init__(self, net: Autoencoder, generator: torch.Generator) -> None:
        self.net, self.generator = net, generator

    def encode(self, x: Tensor) -> Tensor:
        with self._seeded(x.device):
            return self.net.encode(x)

    def decode(self, z: Tensor) -> Tensor:
        with self._seeded(z.device):
            return self.net.decode(z)

    @contextmanager
    def _seeded(self, device: torch.device) -> Iterator[None]:
        seed = torch.randint(2**62, (), generator=self.generator, device=self.generator.device)
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            torch.manual_seed(int(seed))
            yield
