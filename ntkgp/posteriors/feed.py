"""Training data as a sparse process is trained on them: minibatches, each with what the prior says of its points."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ntkgp.posteriors.bound import Piece
from ntkgp.posteriors.data import Data, shuffled
from ntkgp.posteriors.model import LinearModel
from ntkgp.posteriors.whitening import InducingKernel, RowTable

__all__ = ["Batch", "Feed"]


@dataclass(frozen=True)
class Batch:
    """A few training points, and where they lie among all, if these are in memory."""

    data: Data
    index: Tensor | None  # (n,)


@dataclass(frozen=True)
class Feed:
    """All training points, in minibatches of any size and in pieces that fit the memory.

    Args:
        model: the training data.
        size: points in a piece.
        table: their rows, where these can be kept; otherwise the network is differentiated at every piece.
        N: how many points there are.
    """

    model: LinearModel
    size: int
    table: RowTable | None
    N: int

    def in_order(self) -> Iterator[Batch]:
        """Yield all points as they lie."""
        source = self.model.source
        if isinstance(source, Data):
            yield from self._selected(source, torch.arange(self.N).split(self.size))
        else:
            yield from (Batch(data, None) for _, data in self.model._batches())

    def minibatches(self, size: int | None, seed: int) -> Iterator[Batch]:
        """Yield all points once: at random, or as they lie if one batch takes them all.

        Args:
            size: how many at a time, None for all; a loader has its own size.
            seed: of the order.
        """
        source, generator = self.model.source, torch.Generator().manual_seed(seed)
        if not isinstance(source, Data):
            for data in shuffled(source, 0, generator, self.model.lin, self.model.likelihood):
                yield Batch(data, None)
        elif self.takes_all(size):
            yield from self._selected(source, [torch.arange(self.N)])
        else:
            assert size is not None
            yield from self._selected(source, torch.randperm(self.N, generator=generator).split(size))

    def takes_all(self, size: int | None) -> bool:
        """Tell whether a minibatch has all points."""
        return isinstance(self.model.source, Data) and (size is None or size >= self.N)

    def _selected(self, source: Data, parts: Iterator[Tensor] | list[Tensor] | tuple[Tensor, ...]) -> Iterator[Batch]:
        for index in parts:
            index = index.to(source.y.device)
            yield Batch(source[index], index)

    def pieces(self, batch: Batch, kernel: InducingKernel) -> Iterator[Piece]:
        """Yield the points of a minibatch with their rows: those that are kept, or those ``kernel`` computes."""
        for part in torch.arange(len(batch.data), device=batch.data.y.device).split(self.size):
            data = batch.data if len(part) == len(batch.data) else batch.data[part]
            if self.table is not None and batch.index is not None:
                yield Piece(data, self.table[batch.index[part]])
            else:
                yield Piece(data, kernel.rows(data.x))
