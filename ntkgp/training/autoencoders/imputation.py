"""Missing pixels by repeated encoding and decoding, and new images where all pixels are missing."""

from collections.abc import Iterator
from itertools import chain, repeat

import torch
from torch import Tensor

from ntkgp.training.autoencoders.objective import Draw, StochasticAutoencoder

__all__ = ["generated", "imputed"]


def imputed(
    model: StochasticAutoencoder,
    x: Tensor,
    observed: Tensor,
    num_samples: int = 5,
    refinements: int = 5,
    steps: int = 5,
    generator: torch.Generator | None = None,
) -> Tensor:  # (S, N, *)
    """Return images with what is missing filled in, several ways (Miani et al. 2022, A.3; Rezende et al. 2014).

    First each of S chains starts with uniform noise for missing pixels and passes through ``steps`` networks, one draw
    after the other, observed pixels put back each time: chains end in different modes. Then each end is reconstructed
    by ``refinements`` more draws, whose mean is sharper, as they agree on the mode.

    Args:
        model: any stochastic autoencoder.
        x: N images; what they hold where ``observed`` is False is not looked at.
        observed: which pixels are known, of the shape of x or one that broadcasts to it.
        num_samples: S.
        refinements: draws of the second stage.
        steps: passes of the first stage.
        generator: of noise and draws; by default seed 0, so that results repeat.

    Raises:
        TypeError: if ``observed`` is not boolean.
        ValueError: if shapes do not fit, or a number is not positive.
    """
    for name, value in (("num_samples", num_samples), ("refinements", refinements), ("steps", steps)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, but is {value}")
    if observed.dtype != torch.bool:
        raise TypeError(f"observed must be boolean, but has dtype {observed.dtype}")
    try:
        known = observed.expand(x.shape)
    except RuntimeError as error:
        raise ValueError(
            f"observed must have the shape of x, {tuple(x.shape)}, or one that broadcasts to it, but has "
            f"{tuple(observed.shape)}"
        ) from error
    generator = generator or torch.Generator(x.device).manual_seed(0)
    draws = _endless(model, generator)
    found = []
    with torch.no_grad():
        for _ in range(num_samples):
            noise = torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)
            filled = torch.where(known, x, noise)
            for _ in range(steps):
                filled = torch.where(known, x, _passed(model, next(draws), filled))
            mean = torch.stack([_passed(model, next(draws), filled) for _ in range(refinements)]).mean(0)
            found.append(torch.where(known, x, mean))
    return torch.stack(found)


def generated(
    model: StochasticAutoencoder, n: int, example: Tensor, generator: torch.Generator | None = None, **options: int
) -> Tensor:  # (n, *)
    """Return new images: imputation where nothing was observed.

    Args:
        model: any stochastic autoencoder.
        n: how many.
        example: one image, for its shape and dtype only.
        generator: of noise and draws; by default seed 0.
        options: ``refinements`` and ``steps`` of :func:`imputed`.
    """
    nothing = torch.zeros((), dtype=torch.bool, device=example.device)
    return imputed(model, example.new_zeros(n, *example.shape), nothing, 1, generator=generator, **options)[0]


def _passed(model: StochasticAutoencoder, draw: Draw, x: Tensor) -> Tensor:
    return model.likelihood.moments(draw.decode(draw.encode(x)))[0].reshape(x.shape)


def _endless(model: StochasticAutoencoder, generator: torch.Generator) -> Iterator[Draw]:
    """Yield draws for ever; where there are only a few, the same again."""
    return chain.from_iterable(model.draws(1000, generator) for _ in repeat(None))
