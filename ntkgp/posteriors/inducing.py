"""Inducing values: which M numbers of a process stand for all of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ntkgp.linearization import Features, Linearization
from ntkgp.linearization.inputs import Input, batch_size, take
from ntkgp.operators import gram, point_blocks
from ntkgp.posteriors.data import Data, Gone, Source, draw
from ntkgp.posteriors.model import LinearModel
from ntkgp.posteriors.subsets import KMeans
from ntkgp.priors import Prior

__all__ = ["CHOICES", "Inducing", "choose"]

CHOICES = ("kmeans", "greedy", "random")
_CANDIDATES, _FEWEST = 4, 1000  # training points to choose among, for each value, and at least
_TOGETHER = 256 << 20  # bytes of features that clusters are made from at a time


@dataclass(frozen=True)
class Inducing:
    """M values of a process with C outputs: all outputs of each point, or one output of each.

    Pairs of a point and an output keep M apart from C: where a hundred points with ten classes make a thousand values,
    a hundred pairs are a hundred.

    Args:
        x: the points, as the network takes them; they need not be training data.
        outputs: which output of each point, (m,); None for all.

    Raises:
        TypeError: if ``outputs`` does not hold integers.
        ValueError: if there is not one of them for each point.
    """

    x: Input
    outputs: Tensor | None = None

    def __post_init__(self) -> None:
        if self.outputs is None:
            return
        if not isinstance(self.outputs, Tensor) or self.outputs.is_floating_point():
            raise TypeError(f"outputs must be a tensor of integers, but is {self.outputs!r}")
        if self.outputs.shape != (batch_size(self.x),):
            raise ValueError(
                f"outputs must have shape ({batch_size(self.x)},), one for each point, but has "
                f"{tuple(self.outputs.shape)}"
            )

    def num_values(self, lin: Linearization) -> int:
        """Return M."""
        return batch_size(self.x) * (lin.num_outputs if self.outputs is None else 1)

    def features(self, lin: Linearization) -> Features:
        """Return the rows of J at the inducing values; differentiable in x where it requires gradients.

        Raises:
            ValueError: if an output is none of the network's.
        """
        F = lin.features(self.x)
        if self.outputs is None:
            return F
        index = self.outputs.to(F.like.device)
        if index.min() < 0 or index.max() >= lin.num_outputs:
            raise ValueError(
                f"outputs must be from 0 to {lin.num_outputs - 1}, but are from {index.min()} to {index.max()}"
            )
        points = torch.arange(len(index), device=index.device)
        return F.weighted(lambda J: J[points, index].unsqueeze(1))


def choose(how: str, model: LinearModel, prior: Prior, num_inducing: int, seed: int) -> tuple[Inducing, int]:
    """Return inducing values among the training data, and how many points these are; a loader is read once.

    Args:
        how: "kmeans" for the points nearest to the centres of clusters, in the network's last representation; "random"
            for any; either with its share of each output. "greedy" for pairs of a point and an output, one after the
            other the one whose prior variance is largest given those before (pivoted Cholesky), and no more of them
            than tell the candidates' values to rounding.
        model: the training data, of which a few thousand at most, drawn at random, are looked at.
        prior: whose covariance the greedy choice is about.
        num_inducing: M.
        seed: of the draw.

    Raises:
        ValueError: if the name is not known, or the data have fewer than M values.
    """
    if how not in CHOICES:
        raise ValueError(f"inducing must be an Inducing, {', '.join(CHOICES)}, but is {how!r}")
    if num_inducing < 1:
        raise ValueError(f"num_inducing must be at least 1, but is {num_inducing}")
    looked_at = num_inducing if how == "random" else max(_FEWEST, _CANDIDATES * num_inducing)
    if how == "greedy":  # whose features are held
        fitting = model.memory_budget // (2 * model._bytes_each)
        looked_at = max(min(looked_at, fitting), -(-num_inducing // model.lin.num_outputs))
    with torch.no_grad():
        data, N = draw(model.source, model.lin, model.likelihood, looked_at, seed)
        C = model.lin.num_outputs
        if num_inducing > len(data) * C:
            raise ValueError(
                f"num_inducing must be from 1 to the {len(data) * C} values at the training points, "
                f"but is {num_inducing}"
            )
        if how == "greedy":
            return _greedy(model.lin, prior, data, num_inducing), N
        if how == "kmeans" and num_inducing < len(data):
            few = LinearModel(model.lin, Data(data.x, data.y), model.likelihood, min(_TOGETHER, model.memory_budget))
            data = KMeans(num_inducing, seed)(few, prior)
        return _spread_over_outputs(data, num_inducing, C), N


def count(source: Source | Gone) -> int:
    """Return N; a loader is read once."""
    return len(source) if isinstance(source, Data | Gone) else sum(len(y) for _, y in source)


def _spread_over_outputs(data: Data, M: int, C: int) -> Inducing:
    """Pair points with outputs in turn; where values are more than points, the next round pairs others."""
    j = torch.arange(M, device=data.y.device)
    point, turn = j % len(data), j // len(data)
    return Inducing(take(data.x, point), (point + turn) % C)


def _greedy(lin: Linearization, prior: Prior, data: Data, M: int) -> Inducing:
    S0, F, C = prior.covariances(), lin.features(data.x), lin.num_outputs
    remaining = point_blocks(F, None, S0).diagonal(dim1=-2, dim2=-1).flatten().double()  # (n C,)
    floor = torch.finfo(F.like.dtype).eps * remaining.max()
    rows = remaining.new_zeros(M, len(remaining))  # of the pivoted factor
    chosen: list[int] = []
    while len(chosen) < M and (best := int(remaining.argmax())) >= 0 and remaining[best] > floor:
        n, c, m = best // C, best % C, len(chosen)
        one = F[n : n + 1].weighted(lambda J: J[:, c : c + 1])  # noqa: B023
        column = gram(one, F, S0)[0].double() - rows[:m, best] @ rows[:m]
        rows[m] = column / remaining[best].sqrt()
        remaining = remaining - rows[m].square()
        remaining[best] = 0
        chosen.append(best)
    index = torch.tensor(chosen, device=data.y.device)
    return Inducing(take(data.x, index // C), index % C)
