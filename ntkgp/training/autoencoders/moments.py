"""Means and variances of codes and reconstructions over drawn networks, and the likelihood of inputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ntkgp.training.autoencoders.objective import StochasticAutoencoder

__all__ = ["Decoding", "Reconstruction", "codes", "decoded", "reconstructed"]

_TOGETHER = 500  # inputs that a network sees at a time


@dataclass(frozen=True)
class Decoding:
    """Images by a mixture of decoders: the mean of x, its variance between draws, and the mean of that within them."""

    mean: Tensor  # (N, T)
    variance: Tensor  # (N, T), of the draws' means
    noise: Tensor  # (N, T), of the likelihood


@dataclass(frozen=True)
class Reconstruction(Decoding):
    """What a mixture of drawn networks makes of inputs."""

    code: Tensor  # (N, K), mean
    code_variance: Tensor  # (N, K)
    log_prob: Tensor  # (N,), log of the mean of p(x | f) over draws
    expected_log_prob: Tensor  # (N,), mean of log p(x | f): how good every single network is


def reconstructed(
    model: StochasticAutoencoder, x: Tensor, num_samples: int = 100, generator: torch.Generator | None = None
) -> Reconstruction:
    r"""Encode and decode inputs by each drawn network.

    The model is the mixture of its draws θ_s, so that variances have no correction for their number. log p(x) is Eq. 3
    of Miani et al. (2022) at the input itself, :math:`\log \tfrac1S \sum_s p(x \mid f_{\theta_s}(x))`; its bound, Eq.
    8, is the mean of the logarithms.

    Args:
        model: any stochastic autoencoder.
        x: inputs, any number: they are batched here.
        num_samples: how many networks, at most.
        generator: by default seed 0, so that results repeat.

    Raises:
        ValueError: if there is no input, or ``num_samples`` is not positive.
    """
    _check(x, num_samples)
    likelihood = model.likelihood
    code, mean, noise, log_prob = _Running(), _Running(), _Running(), _Running()
    total: Tensor | None = None
    with torch.no_grad():
        for draw in model.draws(num_samples, generator):
            z = _by_parts(draw.encode, x)
            f = _by_parts(draw.decode, z)
            value = likelihood.log_prob(likelihood.validate(x, f.shape[1]), f)
            total = value if total is None else torch.logaddexp(total, value)
            m, v = likelihood.moments(f)
            for running, new in ((code, z.flatten(1)), (mean, m), (noise, v), (log_prob, value)):
                running.add(new)
    assert total is not None
    return Reconstruction(
        mean.mean,
        mean.variance(),
        noise.mean,
        code.mean,
        code.variance(),
        total - math.log(mean.count),
        log_prob.mean,
    )


def decoded(
    model: StochasticAutoencoder, z: Tensor, num_samples: int = 100, generator: torch.Generator | None = None
) -> Decoding:
    """Decode given codes, (N, K), by each drawn network: the uncertainty of a map of the latent space.

    Args:
        model: any stochastic autoencoder.
        z: codes.
        num_samples: how many networks, at most.
        generator: by default seed 0.
    """
    _check(z, num_samples)
    mean, noise = _Running(), _Running()
    with torch.no_grad():
        for draw in model.draws(num_samples, generator):
            m, v = model.likelihood.moments(_by_parts(draw.decode, z))
            mean.add(m)
            noise.add(v)
    return Decoding(mean.mean, mean.variance(), noise.mean)


def codes(
    model: StochasticAutoencoder, x: Tensor, num_samples: int = 100, generator: torch.Generator | None = None
) -> Tensor:  # (S, N, K)
    """Return the codes of inputs by each drawn network.

    Args:
        model: any stochastic autoencoder.
        x: inputs.
        num_samples: how many networks, at most.
        generator: by default seed 0.
    """
    _check(x, num_samples)
    with torch.no_grad():
        return torch.stack([_by_parts(draw.encode, x).flatten(1) for draw in model.draws(num_samples, generator)])


class _Running:
    """Mean and variance of what comes one by one, without cancellation (Welford 1962)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor = torch.zeros(())
        self._squares: Tensor = torch.zeros(())

    def add(self, new: Tensor) -> None:
        self.count += 1
        step = new - self.mean
        self.mean = self.mean + step / self.count
        self._squares = self._squares + step * (new - self.mean)

    def variance(self) -> Tensor:
        return self._squares / self.count


def _by_parts(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cat([function(part) for part in x.split(_TOGETHER)])


def _check(x: Tensor, num_samples: int) -> None:
    if not len(x):
        raise ValueError("there must be at least one input, but there is none")
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, but is {num_samples}")
