"""Autoencoders that were trained apart."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ntkgp.training.autoencoders.objective import Draw
from ntkgp.training.autoencoders.plain import PlainAutoencoder

__all__ = ["AutoencoderEnsemble"]


class AutoencoderEnsemble:
    """Networks that were trained apart, from seeds of their own (Lakshminarayanan et al. 2017).

    Args:
        members: the autoencoders, each with networks and a seed of its own; their likelihood is not learnt.

    Raises:
        ValueError: if there is no member, or the likelihood of one is learnt.
    """

    def __init__(self, members: Sequence[PlainAutoencoder]) -> None:
        if not members:
            raise ValueError("members must be at least one autoencoder, but there is none")
        if any(p.requires_grad for member in members for p in member.likelihood.parameters()):
            raise ValueError("members must have a likelihood that is not learnt: a mixture of them has one only")
        self.members = list(members)
        self.likelihood = members[0].likelihood

    def fit(self, data: Any, epochs: int, checkpoint: str | Path | None = None, **options: Any) -> None:
        """Train one after the other.

        Args:
            data: X, a Dataset or a DataLoader.
            epochs: passes over the data, for each.
            checkpoint: a folder with one file for each member.
            options: see :func:`ntkgp.training.loop.fit`.
        """
        for i, member in enumerate(self.members):
            file = None if checkpoint is None else Path(checkpoint) / f"member-{i}"
            member.fit(data, epochs, checkpoint=file, **options)

    def draws(self, n: int, generator: torch.Generator | None = None) -> Iterator[Draw]:
        """Yield the members, at most n.

        Args:
            n: at least one.
            generator: not needed.
        """
        for member in self.members[:n]:
            yield from member.draws(1, generator)
