"""The variational autoencoder: noise on codes, not on weights."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ntkgp.linearization.inputs import Input
from ntkgp.training.autoencoders.network import Autoencoder
from ntkgp.training.autoencoders.objective import Draw
from ntkgp.training.autoencoders.plain import PlainAutoencoder
from ntkgp.training.objective import Terms

__all__ = ["VariationalAutoencoder"]


class VariationalNetwork(Autoencoder):
    """An encoder of means and logarithms of variances; the code is the mean unless noise is added."""

    def distribution(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (N, *) -> twice (N, K)
        """Return mean and logarithm of the variance of q(z | x)."""
        mean, log_variance = self.encoder(x).flatten(1).chunk(2, 1)
        return mean, log_variance

    def encode(self, x: Tensor) -> Tensor:  # (N, *) -> (N, K)
        """Return the mean."""
        return self.distribution(x)[0]


class VariationalAutoencoder(PlainAutoencoder):
    r"""E_{q(z|x)}[log p(x | z)] − λ KL(q(z | x) ‖ N(0, I)), by one draw of z (Kingma & Welling 2014).

    Args:
        args: as :class:`AutoencoderObjective` takes them, but an encoder that returns 2 K numbers: means, then
            logarithms of variances, as :class:`Heads` does; "heteroscedastic" is for a decoder with two heads.
        kl_weight: λ.
        options: as :class:`AutoencoderObjective` takes them.

    Raises:
        ValueError: if ``kl_weight`` is not positive, and by ``loss`` if the encoder returns an odd number of values.
    """

    net: VariationalNetwork

    def __init__(self, *args: Any, kl_weight: float = 1.0, **options: Any) -> None:
        super().__init__(*args, **options)
        if not kl_weight > 0:
            raise ValueError(f"kl_weight must be positive, but is {kl_weight}")
        self.kl_weight = kl_weight
        self._told |= {"kl_weight": str(kl_weight)}

    def _joined(self, encoder: nn.Module, decoder: nn.Module) -> Autoencoder:
        return VariationalNetwork(encoder, decoder)

    def terms(self, x: Input, y: Tensor, generator: torch.Generator | None = None) -> Terms:
        """Return the parts of the objective, the divergence of q(z | x) as the penalty.

        Args:
            x: S inputs.
            y: what is reconstructed.
            generator: of z; by default this object's own.
        """
        assert isinstance(x, Tensor)
        mean, log_variance = self.net.distribution(x)
        if mean.shape != log_variance.shape:
            raise ValueError(
                f"encoder must return an even number of values, means and logarithms of variances, but returns "
                f"{mean.shape[1] + log_variance.shape[1]}"
            )
        f = self.net.decode(_noisy(mean, log_variance, generator or self.generator))
        log_prob = self.likelihood.log_prob(self._targets(y, f), f).mean()
        kl = (log_variance.exp() + mean.square() - 1 - log_variance).sum(1).mean() / 2
        divergence = (self.mean() / self.prior_std).square().sum() / 2
        return Terms(log_prob, self.kl_weight * kl, divergence / self._size(), self.beta)

    def draws(self, n: int, generator: torch.Generator | None = None) -> Iterator[Draw]:
        """Yield n times the network, with codes drawn from q(z | x).

        Args:
            n: how many.
            generator: by default seed 0, so that they repeat.
        """
        net = self._frozen()
        assert isinstance(net, VariationalNetwork)
        generator = generator or torch.Generator(self.prior_std.device).manual_seed(0)
        for _ in range(n):
            yield _Noisy(net, generator)


class _Noisy:
    """The network of a variational autoencoder with noise on its codes."""

    def __init__(self, net: VariationalNetwork, generator: torch.Generator) -> None:
        self.net, self.generator = net, generator

    def encode(self, x: Tensor) -> Tensor:
        return _noisy(*self.net.distribution(x), self.generator)

    def decode(self, z: Tensor) -> Tensor:
        return self.net.decode(z)


def _noisy(mean: Tensor, log_variance: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
    return mean + (log_variance / 2).exp() * noise
