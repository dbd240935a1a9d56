"""Training data: pairs in memory, a dataset, or a loader whose data do not fit."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, default_collate

from ntkgp.likelihoods import Likelihood
from ntkgp.linearization import Linearization
from ntkgp.linearization.inputs import Input, batch_size, leaves, map_leaves, rebuild, take

__all__ = ["Data", "Gone", "Source", "as_source", "gather"]


@dataclass(frozen=True)
class Data:
    """N points in memory: inputs, targets as the likelihood takes them, and how many points each stands for."""

    x: Input
    y: Tensor
    weights: Tensor | None = None  # (N,) or (N, T)

    def __len__(self) -> int:
        return batch_size(self.x)

    def __getitem__(self, index: slice | Tensor) -> "Data":
        """Return the points that ``index`` selects."""
        return Data(take(self.x, index), self.y[index], None if self.weights is None else self.weights[index])

    def __iter__(self) -> Iterator["Data"]:
        yield self

    def standing_for(self, w: Tensor) -> "Data":  # (N,)
        """Return the same points, each for w_n times as many as before."""
        if self.weights is not None:
            w = self.weights * (w if self.weights.ndim == 1 else w.unsqueeze(-1))
        return Data(self.x, self.y, w)


@dataclass(frozen=True)
class Gone:
    """In the place of a stream of N points that a saved posterior was fitted to: the file does not have them."""

    num_data: int

    def __len__(self) -> int:
        return self.num_data

    def __iter__(self) -> Iterator[Data]:
        raise ValueError(
            "this posterior was loaded without its training data, which were a stream: it predicts, but what needs "
            "another pass over the data needs another fit"
        )


Source = Data | DataLoader


def as_source(data: Any, lin: Linearization, likelihood: Likelihood, weights: Tensor | None = None) -> Source:
    """Check the data and return them in memory, or the loader itself.

    Args:
        data: (X, y), a Dataset, or a DataLoader that yields (X, y).
        lin: the network the inputs are for.
        likelihood: what the targets are for.
        weights: how many points each stands for, (N,), or by site, (N, T); a mask is a weight of 0.

    Raises:
        TypeError: if ``data`` is none of these, or of the wrong dtype.
        ValueError: if it is empty, holds NaN, or inputs, targets and weights do not fit together.
    """
    if isinstance(data, DataLoader):
        if weights is not None:
            raise ValueError("weights need data in memory, but data is a DataLoader: pass (X, y) or a Dataset")
        return _in_order(data)
    if isinstance(data, Dataset):
        data = default_collate([data[i] for i in range(len(data))])  # type: ignore[arg-type]
    return checked(data[0], data[1], lin, likelihood, weights)


def _in_order(loader: DataLoader) -> DataLoader:
    """Return a loader that does not shuffle: what is known of the points is kept from one pass to the next."""
    return _with_sampler(loader, None) if isinstance(loader.sampler, RandomSampler) else loader


def _with_sampler(loader: DataLoader, sampler: Sampler | None) -> DataLoader:
    """Return a loader of the same data in another order; one that decides itself stays what it is."""
    if loader.batch_size is None or isinstance(loader.dataset, IterableDataset):
        return loader
    return DataLoader(
        loader.dataset,
        loader.batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
    )


def shuffled(
    source: Source, size: int, generator: torch.Generator, lin: Linearization, likelihood: Likelihood
) -> Iterator[Data]:
    """Yield all points once, in random order."""
    if isinstance(source, Data):
        for index in torch.randperm(len(source), generator=generator).split(size):
            yield source[index.to(source.y.device)]
        return
    dataset = source.dataset
    sampler = None if isinstance(dataset, IterableDataset) else RandomSampler(dataset, generator=generator)  # type: ignore[arg-type]
    for x, y in _with_sampler(source, sampler):
        yield checked(x, y, lin, likelihood)


def checked(x: Input, y: Tensor, lin: Linearization, likelihood: Likelihood, weights: Tensor | None = None) -> Data:
    """Return a batch of data that fits network and likelihood."""
    lin.learn(x)
    y = likelihood.validate(y, lin.num_outputs)
    if len(y) != batch_size(x):
        raise ValueError(f"X has {batch_size(x)} points, but y has {len(y)}")
    y = y.to(device=lin.device, dtype=lin.dtype if y.is_floating_point() else y.dtype)
    if weights is None:
        return Data(x, y)
    weights = torch.as_tensor(weights)
    T = lin.num_outputs // likelihood.site_size(lin.num_outputs)
    if weights.shape not in ((len(y),), (len(y), T)):
        raise ValueError(f"weights must have shape ({len(y)},) or ({len(y)}, {T}), but has {tuple(weights.shape)}")
    if not torch.isfinite(weights.double()).all() or bool((weights < 0).any()):
        raise ValueError("weights must be finite and not negative")
    return Data(x, y, weights.to(device=lin.device, dtype=lin.dtype))


def draw(source: Source, lin: Linearization, likelihood: Likelihood, M: int, seed: int) -> tuple[Data, int]:
    """Return M points drawn uniformly without replacement, and how many there are; a loader is read once."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(source, Data):
        index = torch.randperm(len(source), generator=generator)[:M]
        return source[index.to(source.y.device)], len(source)
    kept: Data | None = None
    keys, N = torch.zeros(0, dtype=torch.float64), 0
    for x, y in source:
        data = checked(x, y, lin, likelihood)
        keys = torch.cat([keys, torch.rand(len(data), generator=generator, dtype=torch.float64)])
        kept, N = data if kept is None else joined(kept, data), N + len(data)
        index = keys.argsort()[:M]  # the points with the smallest keys
        keys, kept = keys[index], kept[index.to(kept.y.device)]
    if kept is None:
        raise ValueError("data is an empty loader: at least one batch is expected")
    return kept, N


def joined(old: Data, new: Data) -> Data:
    """Return both, one after the other."""
    x = rebuild(old.x, *(torch.cat(pair) for pair in zip(leaves(old.x), leaves(new.x), strict=True)))
    weights = None
    if old.weights is not None or new.weights is not None:
        weights = torch.cat([_weights_of(old), _weights_of(new)])
    return Data(x, torch.cat([old.y, new.y]), weights)


def _weights_of(data: Data) -> Tensor:
    if data.weights is not None:
        return data.weights
    like = data.y if data.y.is_floating_point() else torch.zeros((), device=data.y.device)
    return like.new_ones(len(data))


def gather(source: Iterable, lin: Linearization, likelihood: Likelihood) -> Data:
    """Read a loader to its end and return all of it in memory."""
    parts = [batch if isinstance(batch, Data) else checked(batch[0], batch[1], lin, likelihood) for batch in source]
    if not parts:
        raise ValueError("data is an empty loader: at least one batch is expected")
    if len(parts) == 1:
        return parts[0]
    x = rebuild(parts[0].x, *(torch.cat(column) for column in zip(*(leaves(p.x) for p in parts), strict=True)))
    return Data(map_leaves(Tensor.contiguous, x), torch.cat([p.y for p in parts]))
