"""Which M of N training points a function-space posterior uses, and how many points each stands for."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ntkgp.linearization import Features
from ntkgp.linearization.inputs import leaves
from ntkgp.operators import gram, point_blocks
from ntkgp.posteriors.data import Data
from ntkgp.posteriors.model import LinearModel
from ntkgp.priors import Prior

__all__ = ["Greedy", "KMeans", "Leverage", "Random", "Selector", "Stratified"]


@dataclass(frozen=True)
class Selector(ABC):
    """Choose ``size`` points.

    Args:
        size: M.
        seed: of the choice.
    """

    size: int
    seed: int = 0

    def __call__(self, model: LinearModel, prior: Prior) -> Data:
        """Return the chosen points with their weights, multiplied into those the data have.

        Raises:
            ValueError: if there are fewer than M points.
        """
        data = model.data
        if not 1 <= self.size <= len(data):
            raise ValueError(f"subset must be from 1 to the {len(data)} training points, but is {self.size}")
        with torch.no_grad():
            index, weights = self._choose(model, prior)
        return data[index].standing_for(weights.to(next(iter(prior.parameters()))))

    @abstractmethod
    def _choose(self, model: LinearModel, prior: Prior) -> tuple[Tensor, Tensor]:  # (M,), (M,)
        """Return indices and weights."""

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


@dataclass(frozen=True)
class Random(Selector):
    """M points drawn uniformly without replacement; each stands for N/M."""

    def _choose(self, model: LinearModel, prior: Prior) -> tuple[Tensor, Tensor]:
        N = len(model.data)
        return torch.randperm(N, generator=self._generator())[: self.size], torch.full((self.size,), N / self.size)


@dataclass(frozen=True)
class Stratified(Selector):
    """As many points of each class as of any other, as far as there are; one of class c stands for N_c / M_c."""

    def _choose(self, model: LinearModel, prior: Prior) -> tuple[Tensor, Tensor]:
        y = model.data.y.cpu()
        if y.is_floating_point() or y.shape[1] != 1:
            raise ValueError("a class-balanced subset needs one class label for each point")
        order = torch.randperm(len(y), generator=self._generator())
        members = [order[y[order, 0] == c] for c in y.unique()]
        counts = _even_shares([len(m) for m in members], self.size)
        index = torch.cat([m[:k] for m, k in zip(members, counts, strict=True)])
        weights = [torch.full((k,), len(m) / max(k, 1)) for m, k in zip(members, counts, strict=True)]
        return index, torch.cat(weights)


def _even_shares(sizes: list[int], total: int) -> list[int]:
    """Share out ``total`` as evenly as sizes allow, one at a time to whoever has least and is not full."""
    shares = [0] * len(sizes)
    for _ in range(total):
        open_ = [i for i in range(len(sizes)) if shares[i] < sizes[i]]
        shares[min(open_, key=lambda i: shares[i])] += 1
    return shares


@dataclass(frozen=True)
class KMeans(Selector):
    """The points nearest to the centres of M clusters of the network's outputs and inputs; each stands for its cluster.

    Clusters are found among the inputs of the last layer with outputs of its own, or, where there is none, among the
    inputs of the network.
    """

    def _choose(self, model: LinearModel, prior: Prior) -> tuple[Tensor, Tensor]:
        from sklearn.cluster import KMeans as Clusters  # two seconds, which `import ntkgp` must not take

        H = torch.cat([_embedding(chunk.F, chunk.data) for chunk in model]).cpu()
        found = Clusters(self.size, n_init=1, random_state=self.seed).fit(H.numpy())
        centres = torch.as_tensor(found.cluster_centers_).to(H)
        labels = torch.as_tensor(found.labels_).long()
        distance = (H - centres[labels]).square().sum(1)
        index = torch.stack(
            [torch.where(labels == c, distance, torch.inf).argmin() for c in range(self.size) if (labels == c).any()]
        )
        return index, torch.bincount(labels[...], minlength=self.size)[labels[index]].double()


def _embedding(F: Features, data: Data) -> Tensor:  # (N, d)
    shared = [block.outer.inputs[:, 0] for block in F.blocks if block.outer.shared]
    return shared[-1] if shared else torch.cat([leaf.flatten(1).to(F.like) for leaf in leaves(data.x)], dim=1)


@dataclass(frozen=True)
class Leverage(Selector):
    """M draws with replacement, π_n in proportion to the prior variance tr k(x_n, x_n); a draw stands for 1/(M π_n).

    A point drawn several times appears once, with the sum of its weights.
    """

    def _choose(self, model: LinearModel, prior: Prior) -> tuple[Tensor, Tensor]:
        scores = _prior_traces(model, prior).cpu().double()
        pi = scores / scores.sum()
        draws = torch.multinomial(pi, self.size, replacement=True, generator=self._generator())
        index, counts = draws.unique(return_counts=True)
        return index, counts / (self.size * pi[index])


@dataclass(frozen=True)
class Greedy(Selector):
    """Point after point the one with the largest remaining prior variance (pivoted Cholesky); each stands for itself.

    The variance is that of the sum of a point's outputs' variances, given that the outputs of the points before it
    are known.
    """

    def _choose(self, model: LinearModel, prior: Prior) -> tuple[Tensor, Tensor]:
        S0, C = prior.covariances(), model.lin.num_outputs
        remaining = torch.cat([point_blocks(chunk.F, None, S0) for chunk in model])  # (N, C, C)
        starts = torch.tensor([0, *[len(chunk.data) for chunk in model]]).cumsum(0)
        chosen: list[int] = []
        rows = remaining.new_zeros(0, len(remaining) * C)  # of the factor, (m C, N C)
        floor = torch.finfo(remaining.dtype).eps ** 0.5 * _trace(remaining).max()
        for _ in range(self.size):
            score = _trace(remaining)
            score[chosen] = -torch.inf
            n = int(score.argmax())
            chosen.append(n)
            at = int(torch.searchsorted(starts, n, right=True)) - 1
            F = list(model)[at].F[n - int(starts[at]) : n - int(starts[at]) + 1]
            column = torch.cat([gram(F, chunk.F, S0) for chunk in model], dim=1)  # (C, N C)
            column = column - rows[:, n * C : (n + 1) * C].mT @ rows
            block = column[:, n * C : (n + 1) * C]
            L = torch.linalg.cholesky(block + floor * torch.eye(C).to(block))
            new = torch.linalg.solve_triangular(L, column, upper=False)
            rows = torch.cat([rows, new])
            W = new.unflatten(1, (-1, C)).transpose(0, 1)  # (N, C, C)
            remaining = remaining - W.mT @ W
        return torch.tensor(chosen), torch.ones(self.size)


def _prior_traces(model: LinearModel, prior: Prior) -> Tensor:  # (N,)
    return torch.cat([_trace(point_blocks(chunk.F, None, prior.covariances())) for chunk in model])


def _trace(blocks: Tensor) -> Tensor:  # (N, C, C) -> (N,)
    return blocks.diagonal(dim1=-2, dim2=-1).sum(-1)
