"""The linear model on its training data: f, J and their products, from features that are computed once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ntkgp.likelihoods import Likelihood
from ntkgp.linearization import Features, Linearization
from ntkgp.linearization.inputs import map_leaves
from ntkgp.posteriors.data import Data, Source, checked, shuffled
from ntkgp.solvers import ALONE, Ranks

__all__ = ["Chunk", "LinearModel", "Minibatch"]


@dataclass
class Chunk:
    """Some training points with the network's outputs and the factored Jacobian there, each computed when asked for."""

    data: Data
    lin: Linearization
    points: slice | Tensor  # which of this process's training points these are
    first: int  # which of all training points is the first, where they lie side by side
    kept: bool  # whether features stay for the next pass, so that products with J should come from them

    @cached_property
    def f(self) -> Tensor:  # (n, C)
        """What the network returns."""
        return self.lin(self.data.x)

    @cached_property
    def F(self) -> Features:
        """J(x) in factored form."""
        with torch.no_grad():
            return self.lin.features(self.data.x)

    def push(self, v: Tensor) -> Tensor:  # (S, P) -> (S, n, C)
        """Return J v."""
        return self.F.jvp(split(self.lin, v)) if self._factored(len(v)) else self.lin.jvp(self.data.x, v)

    def pull(self, u: Tensor) -> Tensor:  # (S, n, C) -> (S, P)
        """Return Jᵀ u."""
        return join(self.lin, self.F.vjp(u)) if self._factored(len(u)) else self.lin.vjp(self.data.x, u)

    def _factored(self, S: int) -> bool:
        """Whether S products should come from features: if they are there, or cost less than the products themselves.

        Features take C backward passes at once, about C/2 forward passes; J v and Jᵀu together more than one a vector.
        """
        return self.kept or "F" in self.__dict__ or self.lin.num_outputs <= 2 * S

    def log_prob(self, likelihood: Likelihood, f: Tensor) -> Tensor:  # ()
        """Return the weighted log likelihood of latent values f."""
        return likelihood.weighted_log_prob(self.data.y, f, self.data.weights)


@dataclass(frozen=True)
class Minibatch:
    """A few points in no particular order: this process's share of them."""

    data: Data
    size: int  # how many they are with those of the other processes


class LinearModel:
    """f_lin(x_n; θ* + δ) = f_n + J_n δ at all training points n.

    Features of data in memory are kept if they fit the budget, and all products come from them. Otherwise, and for
    loaders, products differentiate the network, and a pass that needs features computes them again, chunk by chunk.

    Args:
        lin: the linearised network.
        source: the training data.
        likelihood: what the targets of a loader are checked by.
        memory_budget: bytes that kept features may take.
        ranks: which processes share the data; this one iterates over its part, and ``summed`` adds up all parts.
    """

    def __init__(
        self,
        lin: Linearization,
        source: Source,
        likelihood: Likelihood,
        memory_budget: int = 4 << 30,
        ranks: Ranks = ALONE,
    ) -> None:
        self.lin, self.source, self.likelihood, self.memory_budget = lin, source, likelihood, memory_budget
        self.ranks = ranks
        self._chunk: Chunk | None = None

    def __iter__(self) -> Iterator[Chunk]:
        """Yield all training points in order, in chunks; all in one if their features are kept."""
        if self.kept:
            ours = self.ranks.part(len(self.data))
            self._chunk = self._chunk or self._chunk_of(self.data[ours], 0, ours.start, kept=True)
            yield self._chunk
            return
        position = 0
        for first, data in self._batches():
            self.lin.learn(data.x)
            step = max(1, self.memory_budget // (4 * self._bytes_each))
            for start in range(0, len(data), step):
                yield self._chunk_of(data[start : start + step], position + start, first + start, kept=False)
            position += len(data)

    def _chunk_of(self, data: Data, start: int, first: int, kept: bool) -> Chunk:
        return Chunk(data, self.lin, slice(start, start + len(data)), first, kept)

    def shuffled_chunks(self, size: int, generator: torch.Generator) -> Iterator[Chunk]:
        """Yield all points in chunks that know their places: at random if they are in memory, else as they lie."""
        if not isinstance(self.source, Data):
            yield from self
            return
        for index in torch.randperm(len(self.source), generator=generator).split(size):
            index = index.to(self.source.y.device)
            yield Chunk(self.source[index], self.lin, index, 0, kept=False)

    def _batches(self) -> Iterator[tuple[int, Data]]:
        """Yield our batches, each with the number of points before it; of a loader every W-th batch."""
        if isinstance(self.source, Data):
            ours = self.ranks.part(len(self.source))
            yield ours.start, self.source[ours]
            return
        first, batches = 0, 0
        for i, (x, y) in enumerate(self.source):
            if i % self.ranks.world == self.ranks.rank:
                yield first, checked(x, y, self.lin, self.likelihood)
            first, batches = first + len(y), i + 1
        if batches == 0:
            raise ValueError("data is an empty loader: at least one batch is expected")
        if batches < self.ranks.world:
            raise ValueError(f"data must have a batch for each of {self.ranks.world} processes, but has {batches}")

    def minibatches(self, size: int, generator: torch.Generator) -> Iterator[Minibatch]:
        """Yield all points once, in random order; processes share each minibatch.

        Args:
            size: how many points at a time; a loader has its own size.
            generator: of the order; that of an iterable dataset is its own.
        """
        for data in shuffled(self.source, size, generator, self.lin, self.likelihood):
            yield Minibatch(data[self.ranks.part(len(data))], len(data))

    def summed(self, part: Tensor) -> Tensor:
        """Return the sum over the processes that share the data."""
        return self.ranks.summed(part)

    @property
    def kept(self) -> bool:
        """Whether features stay in memory between passes."""
        return isinstance(self.source, Data) and self.features_bytes <= self.memory_budget

    @cached_property
    def features_bytes(self) -> int:
        """What the features of all points take; data in memory only."""
        if not isinstance(self.source, Data):
            raise ValueError("the size of a loader's features is not known")
        self.lin.learn(self.source.x)
        return self._bytes_each * len(self.source)

    @property
    def _bytes_each(self) -> int:
        capturing = self.lin.capture_bytes
        if capturing > self.memory_budget:  # not even to look at: a network with as many outputs as pixels
            return capturing
        return max(1, self.lin.pilot().nbytes // 2)

    @property
    def data(self) -> Data:
        """All training points.

        Raises:
            ValueError: if they come from a loader.
        """
        if not isinstance(self.source, Data):
            raise ValueError("this needs data in memory, but they come from a DataLoader")
        return self.source

    def f(self) -> Tensor:  # (N, C)
        """Return the network's outputs at all of our points."""
        return torch.cat([chunk.f for chunk in self])

    def push(self, v: Tensor) -> Tensor:  # (S, P) -> (S, N, C)
        """Return J v at all of our points."""
        return torch.cat([chunk.push(v) for chunk in self], dim=1)

    def pull(self, u: Tensor) -> Tensor:  # (S, N, C) -> (S, P)
        """Return Jᵀ u."""
        total = u.new_zeros(u.shape[0], self.lin.num_params)
        for chunk in self:
            total += chunk.pull(u[:, chunk.points])
        return self.summed(total)

    def converted(self, fn: Callable[[Tensor], Tensor]) -> "LinearModel":
        """Return the model in another dtype or on another device; a loader stays what it is."""
        lin = self.lin.converted(lambda module: module._apply(fn))
        source = self.source
        if isinstance(source, Data):
            weights = None if source.weights is None else fn(source.weights)
            source = Data(map_leaves(fn, source.x), fn(source.y), weights)
        return LinearModel(lin, source, self.likelihood, self.memory_budget, self.ranks)

    def with_source(self, source: Source) -> "LinearModel":
        """Return the same model on other data, all of them."""
        return LinearModel(self.lin, source, self.likelihood, self.memory_budget)

    def shared(self) -> "LinearModel":
        """Return the same model with its data shared among the processes that ``torchrun`` started."""
        ranks = Ranks.here()
        if ranks == self.ranks:
            return self
        if isinstance(self.source, Data) and len(self.source) < ranks.world:
            raise ValueError(f"data must have a point for each of {ranks.world} processes, but has {len(self.source)}")
        return LinearModel(self.lin, self.source, self.likelihood, self.memory_budget, ranks)


def split(lin: Linearization, v: Tensor) -> dict[str, Tensor]:  # (S, P) -> {name: (S, p)}
    """Cut flat vectors into those of parameters."""
    return dict(zip(lin.layout.names, v.split(lin.layout.sizes, dim=-1), strict=True))


def join(lin: Linearization, parts: dict[str, Tensor]) -> Tensor:  # {name: (..., p)} -> (..., P)
    """Concatenate what parameters have; those that the network does not use have zeros."""
    like = next(iter(parts.values()))
    sizes = zip(lin.layout.names, lin.layout.sizes, strict=True)
    rows = [parts[name] if name in parts else like.new_zeros(*like.shape[:-1], size) for name, size in sizes]
    return torch.cat(rows, dim=-1)
