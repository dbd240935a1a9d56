"""Training data: pairs in memory, a dataset, or a loader whose data do not fit."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from ntkgp.likelihoods import Likelihood
from ntkgp.linearization import Linearization
from ntkgp.linearization.inputs import Input, batch_size, leaves, map_leaves, rebuild, take

__all__ = ["Data", "Source", "as_source", "gather"]


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
        return data
    if isinstance(data, Dataset):
        data = default_collate([data[i] for i in range(len(data))])  # type: ignore[arg-type]
    return checked(data[0], data[1], lin, likelihood, weights)


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


def gather(source: Iterable, lin: Linearization, likelihood: Likelihood) -> Data:
    """Read a loader to its end and return all of it in memory."""
    parts = [batch if isinstance(batch, Data) else checked(batch[0], batch[1], lin, likelihood) for batch in source]
    if not parts:
        raise ValueError("data is an empty loader: at least one batch is expected")
    if len(parts) == 1:
        return parts[0]
    x = rebuild(parts[0].x, *(torch.cat(column) for column in zip(*(leaves(p.x) for p in parts), strict=True)))
    return Data(map_leaves(Tensor.contiguous, x), torch.cat([p.y for p in parts]))
