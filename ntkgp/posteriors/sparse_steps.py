"""Steps of q(v) on a minibatch: what its points say, natural-gradient steps, and gradients for Adam's."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ntkgp.posteriors.bound import Averages, Piece, Statistics, View, laplace, surrogate
from ntkgp.posteriors.feed import Batch, Feed
from ntkgp.posteriors.whitened import Natural, WhitenedGaussian

if TYPE_CHECKING:
    from ntkgp.posteriors.sparse import VariationalPosterior

__all__ = ["Adam", "Measured", "Steps"]

_HALVINGS = 8  # of a natural step that lowers the bound on its own minibatch
_STARTS = 1.0, 0.5, 0.25, 0.125, 0.0  # parts of the first Newton step, the best of which is taken
_APART = 7919  # between the seeds of pieces of a minibatch
_TINY = 1e-8


@dataclass(frozen=True)
class Measured:
    """An objective as some points estimate it, and what they say of v."""

    value: Tensor  # (), with its graph
    error: float  # the standard error of the value's draws
    said: Statistics | None  # None if it was not asked for


@dataclass
class Steps:
    """What can be done to q with a minibatch of a posterior's training data.

    Args:
        posterior: which process and likelihood.
        feed: the training data.
        learning: whether graphs to the hyperparameters are wanted.
    """

    posterior: "VariationalPosterior"
    feed: Feed
    learning: bool

    def __post_init__(self) -> None:
        self._fixed = None if self.learning else self.posterior.process.view(False, self.posterior.free)

    def on(self, batch: Batch, learning: bool = False) -> "Measure":
        """Return what measures on a minibatch under the current hyperparameters; with graphs if ``learning``."""
        process, free = self.posterior.process, self.posterior.free
        kernel, view = process.view(learning, free) if self._fixed is None else self._fixed
        if len(batch.data) > self.feed.size and not learning:  # too many to hold
            return Measure(self, view, lambda: self.feed.pieces(batch, kernel), len(batch.data))
        pieces = list(self.feed.pieces(batch, kernel))
        return Measure(self, view, lambda: pieces, len(batch.data))


@dataclass(frozen=True)
class Measure:
    """The points of a minibatch, as often as they are asked for."""

    steps: Steps
    view: View
    pieces: Callable[[], Iterable[Piece]]
    n: int

    @property
    def scale(self) -> float:
        """How many points each of these stands for."""
        return self.steps.feed.N / self.n

    def at_network(self) -> tuple[float, Statistics]:
        """Return log p(y | f), scaled to all points, and what these points say at the network's own outputs f."""
        value, said = 0.0, None
        with torch.no_grad():
            for piece in self.pieces():
                log_prob, more = laplace(self.steps.posterior.likelihood, piece, self.view)
                value, said = value + self.scale * log_prob.item(), more if said is None else said + more
        assert said is not None
        return value, said

    def under(self, q: WhitenedGaussian, averages: Averages, seed: int, listening: bool = True) -> Measured:
        """Return the objective, scaled to all points, and if ``listening`` what they say, averaged over q(f)."""
        likelihood = self.steps.posterior.likelihood
        total, said, variance = torch.zeros_like(self.view.epsilon.detach()), None, 0.0
        for i, piece in enumerate(self.pieces()):
            marginals = self.view.marginals(piece.rows, q)
            E = averages(likelihood, piece, marginals, seed + _APART * i)
            total, variance = total + surrogate(E, marginals), variance + E.standard_error**2
            if listening:
                with torch.no_grad():
                    distance = marginals.mean.detach() - marginals.mu
                    more = Statistics.of(marginals.W.detach(), E.r, E.curvature, distance)
                    said = more if said is None else said + more
        return Measured(self.scale * total - q.kl(), self.scale * variance**0.5, said)

    def natural_step(self, q: Natural, found: Measured, rate: float, averages: Averages, seed: int) -> Natural:
        """Return (1 − ρ) q + ρ (I + N/n Σ Wᵀ E[Λ] W, N/n Σ Wᵀ(E[r] + E[Λ] W m)) in natural parameters.

        A free mean takes Newton's steps, which may be too long where Λ is small: they are halved until the bound, as
        this minibatch estimates it by the same draws, does not fall by more than the error of these.
        """
        assert found.said is not None
        with torch.no_grad():
            target = found.said.natural(self.scale, self.view.free)
            new = q.toward(target, rate)
            if not self.view.free:
                return new
            lowest = found.value.item() - _TINY * (1 + abs(found.value.item())) - found.error
            fixed = replace(self, view=self.view.detach())
            for _ in range(_HALVINGS):
                if fixed.under(new, averages, seed, listening=False).value >= lowest:
                    break
                rate = rate / 2
                new = q.toward(target, rate)
            return new

    def best_start(self, q: Natural, averages: Averages, seed: int) -> Natural:
        """Return q with as much of its mean, a Newton step from the network's outputs, as suits these points best.

        All of it where Λ does not depend on f: there the step is exact.
        """
        likelihood, C = self.steps.posterior.likelihood, self.steps.posterior.lin.num_outputs
        if not self.view.free or likelihood.curvature_atoms(C) is not None:
            return q
        with torch.no_grad():
            starts = [Natural(q.P, part * q.h) for part in _STARTS]
            found = torch.stack([self.under(start, averages, seed, False).value for start in starts])
        return starts[int(found.nan_to_num(-torch.inf, posinf=-torch.inf).argmax())]


@dataclass(frozen=True)
class Adam:
    """Adam's moments, explicit (Kingma & Ba 2015)."""

    first: dict[str, Tensor]
    second: dict[str, Tensor]
    moves: int = 0

    @classmethod
    def at_rest(cls, moving: dict[str, Tensor]) -> "Adam":
        """Return the moments before any step."""
        return cls(
            {k: torch.zeros_like(v) for k, v in moving.items()}, {k: torch.zeros_like(v) for k, v in moving.items()}
        )

    def step(self, gradients: dict[str, Tensor], rate: float) -> tuple[dict[str, Tensor], "Adam"]:
        """Return by how much each tensor moves up its gradient, and the moments then."""
        b1, b2, t = 0.9, 0.999, self.moves + 1
        first = self.first | {k: torch.lerp(g, self.first[k], b1) for k, g in gradients.items()}
        second = self.second | {k: torch.lerp(g.square(), self.second[k], b2) for k, g in gradients.items()}
        moved = {k: rate * (first[k] / (1 - b1**t)) / ((second[k] / (1 - b2**t)).sqrt() + _TINY) for k in gradients}
        return moved, Adam(first, second, t)
