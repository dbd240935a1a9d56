"""What autoencoders have in common: inputs are their own targets, and a model is a mixture of the networks it draws."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ntkgp.likelihoods import Gaussian, Likelihood
from ntkgp.linearization.inputs import Input
from ntkgp.posteriors import Posterior
from ntkgp.posteriors.fit import first_input
from ntkgp.training.autoencoders.network import Autoencoder, reconstructing
from ntkgp.training.objective import WeightObjective
from ntkgp.training.smoothness import evaluating

__all__ = ["AutoencoderObjective", "Draw", "StochasticAutoencoder"]


class Draw(Protocol):
    """An encoder and a decoder that were drawn together."""

    def encode(self, x: Tensor) -> Tensor:  # (N, *) -> (N, K)
        """Return codes."""

    def decode(self, z: Tensor) -> Tensor:  # (N, K) -> (N, C)
        """Return what the likelihood takes."""


class StochasticAutoencoder(Protocol):
    """What can be asked for means, variances, likelihoods and missing pixels, however it was trained."""

    likelihood: Likelihood

    def draws(self, n: int, generator: torch.Generator | None = None) -> Iterator[Draw]:
        """Yield n draws, or as many as there are if those are fewer; by default seed 0, so that they repeat."""


class AutoencoderObjective(WeightObjective):
    """An objective over the weights of encoder and decoder: p(x | f(x)), with f(x) the reconstruction.

    Args:
        encoder: from inputs to codes.
        decoder: from codes to reconstructions.
        likelihood: p(x | f), a name or an object; by default Gaussian with unit noise, which is not learnt.
        num_data: N, how many points the training data have; ``fit`` finds out itself.
        prior_std: s of the weights' prior N(0, s²), a number, or {parameter or module name: number}.
        beta: weight of the prior.
        seed: of order and noise.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if a number is not positive.
    """

    net: Autoencoder

    def __init__(
        self,
        encoder: nn.Module,
        decoder: nn.Module,
        likelihood: str | Likelihood | None = None,
        num_data: int | None = None,
        prior_std: float | Mapping[str, float] = 1.0,
        beta: float = 1.0,
        seed: int = 0,
    ) -> None:
        likelihood = Gaussian(1.0, learn_noise=False) if likelihood is None else likelihood
        super().__init__(self._joined(encoder, decoder), likelihood, num_data, prior_std, beta, seed)

    def _joined(self, encoder: nn.Module, decoder: nn.Module) -> Autoencoder:
        return Autoencoder(encoder, decoder)

    def loss(self, x: Input, y: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:  # ()
        """Return the loss of a minibatch, an estimate of −L / N; by default x itself is reconstructed."""
        return super().loss(x, self._own(x, y), generator)

    def _own(self, x: Input, y: Tensor | None) -> Tensor:
        if y is None and not isinstance(x, Tensor):
            raise TypeError(f"y must be given if x is a {type(x).__name__}: only a tensor is its own target")
        return x if y is None else y  # type: ignore[return-value]

    def fit(self, data: Any, epochs: int, **options: Any) -> Posterior:
        """Train on inputs alone, and return the posterior.

        Args:
            data: X, a Dataset or a DataLoader; labels are left out.
            epochs: passes over the data.
            options: see :func:`ntkgp.training.loop.fit`.
        """
        return super().fit(self._pairs(data), epochs, **options)

    def posterior(self, data: Any, memory_budget: int = 4 << 30) -> Posterior:
        """Return q, as it is now, as a posterior of the network linearised at μ.

        Args:
            data: the training inputs: X, a Dataset or a DataLoader.
            memory_budget: bytes that features may take.
        """
        return super().posterior(self._pairs(data), memory_budget)

    def _pairs(self, data: Any) -> Any:
        """Return (x, x), and refuse a decoder that does not reconstruct x."""
        pairs = reconstructing(data)
        x = first_input(pairs)[:1]
        with torch.no_grad(), evaluating(self.net):
            C = self.outputs(x).shape[1]
        D, k = x.numel(), self.likelihood.site_size(C)
        if k * D != C:
            of = f"{k} times {D}" if k > 1 else str(D)
            raise ValueError(f"decoder must return {of} numbers for an input of {D}, but returns {C}")
        return pairs
