"""q(v) of a sparse process, and hyperparameters with it, by minibatches; every state can be resumed from."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ntkgp.likelihoods import Expectation
from ntkgp.posteriors.bound import Averages, Marginals, Piece, Statistics, View, laplace, surrogate
from ntkgp.posteriors.checkpoint import Checkpoint
from ntkgp.posteriors.feed import Batch, Feed
from ntkgp.posteriors.tuning import hidden, log_hyperprior, settings
from ntkgp.posteriors.whitened import Factored, Natural, WhitenedGaussian

if TYPE_CHECKING:
    from ntkgp.posteriors.sparse import VariationalPosterior

__all__ = ["Plan", "beside", "train"]

_EVERY = 100  # steps between checkpoints within an epoch
_FIRST, _DECAY = 0.5, 0.6  # rates of natural steps: the largest, and the power of 1 / (steps so far) they fall with
_HALVINGS = 8  # of a natural step that lowers the bound on its own minibatch
_MOMENTS = 0.9, 0.999  # Adam's, as its authors have them
_TINY = 1e-8


@dataclass(frozen=True)
class Plan:
    """How to train.

    Args:
        averages: how the likelihood is averaged; for powers of it q moves by Adam's steps, else by natural gradients.
        epochs: passes over the data, the first of them for what the data say at the network's own outputs.
        batch_size: points in a minibatch, None for all; a loader has its own.
        seed: of order and draws.
        rate: of Adam's first steps, falling linearly to zero.
        learnt: hyperparameters, and inducing points, to be learnt with q.
    """

    averages: Averages
    epochs: int
    batch_size: int | None
    seed: int
    rate: float
    learnt: dict[str, nn.Parameter] = field(default_factory=dict)

    def identity(self) -> dict[str, str]:
        """Return what tells this plan from others."""
        told = {name: str(getattr(self, name)) for name in ("averages", "epochs", "batch_size", "seed", "rate")}
        return told | {"learnt": ", ".join(self.learnt)}


@dataclass(frozen=True)
class State:
    """How far a run has come."""

    q: Natural  # after the first epoch of a run by Adam's steps: where their coordinates have their origin
    moving: dict[str, Tensor]  # what Adam moves: hyperparameters, and coordinates of q
    first: dict[str, Tensor]  # its moments
    second: dict[str, Tensor]
    epoch: int = 0
    batch: int = 0  # minibatches of this epoch that are done
    seen: int = 0  # points of this epoch that are done
    step: int = 0  # minibatches in all after the first epoch
    value: float = 0.0  # sum of the objective's estimates in this epoch, each times its share of the points


def train(
    posterior: "VariationalPosterior", plan: Plan, checkpoint: str | Path | None = None, progress: bool | None = None
) -> tuple[Natural, list[dict[str, Any]]]:
    r"""Return the q that maximises the bound, or a power of the likelihood in its place, and what each epoch saw.

    The first epoch goes through the data once and adds up P = I + Σ Wᵀ Λ W and h = Σ Wᵀ(r + Λ(f − μ)) at the network's
    own outputs f: for Gaussian noise that is the optimum already. From there natural-gradient steps

    .. math:: P \leftarrow (1-\rho) P + \rho \big(I + \tfrac{N}{n} \sum W^\top E[\Lambda] W\big), \qquad
       h \leftarrow (1-\rho) h + \rho \tfrac{N}{n} \sum W^\top (E[r] + E[\Lambda] W m)

    with ρ = n/N, so that the last epoch counts, or larger at first where the mean or hyperparameters move; h stays 0
    for a fixed mean. In whitened coordinates the divergence does not know the hyperparameters: their gradient is that
    of the likelihood's part alone.

    Args:
        posterior: which process, likelihood and data; hyperparameters that ``plan`` names change in place.
        plan: how.
        checkpoint: a file that holds the state; if it is there already, the run goes on from it.
        progress: whether to show a bar; by default in a terminal.

    Raises:
        ValueError: if the checkpoint belongs to another run.
    """
    before = {name: p.detach().clone() for name, p in plan.learnt.items()}
    run = Run(posterior, plan, posterior.process.feed(bool(plan.learnt)))
    file = None if checkpoint is None else Checkpoint(Path(checkpoint), run.identity())
    try:
        return run.finish(file, progress)
    except BaseException:
        with torch.no_grad():
            for name, value in before.items():
                plan.learnt[name].copy_(value)
        raise


@dataclass
class Run:
    """A run; all that changes is in its states and in the hyperparameters it learns."""

    posterior: "VariationalPosterior"
    plan: Plan
    feed: Feed
    history: list[dict[str, Any]] = field(default_factory=list)

    def identity(self) -> dict[str, str]:
        """Return what tells this run from others: network, data, process, hyperparameters and plan."""
        post = self.posterior
        return {
            "fingerprint": post.lin.fingerprint(),
            "points": str(self.feed.N),
            "mean": post.mean,
            "nugget": repr(post.process.nugget),
            "hyperparameters": _digest([*post.parameters(), *post.buffers()]),
        } | self.plan.identity()

    def finish(self, file: Checkpoint | None, progress: bool | None) -> tuple[Natural, list[dict[str, Any]]]:
        """Run to the end, from the start or from what the file holds."""
        state = self._start() if file is None or not file.path.exists() else self._resumed(file)
        total, seen = self.plan.epochs * self.feed.N, state.epoch * self.feed.N + state.seen
        with tqdm(total=total, initial=seen, desc="train", unit="points", disable=hidden(progress)) as bar:
            while state.epoch < self.plan.epochs:
                for batch in islice(self._batches(state.epoch), state.batch, None):
                    state = self._step(state, batch)
                    bar.update(len(batch.data))
                    bar.set_postfix_str(f"{self._name(state)} {state.value / state.seen:.5g}", refresh=False)
                    if file is not None and state.batch % _EVERY == 0:
                        self._save(state, file)
                state = self._next_epoch(state)
                if file is not None:
                    self._save(state, file)
        return self._q(state), self.history

    def _start(self) -> State:
        M = self.posterior.num_inducing
        moving = {name: p.detach().clone() for name, p in self.plan.learnt.items()}
        if self._by_gradients:
            moving["q.raw"] = torch.zeros(M, M, dtype=torch.float64, device=self.posterior.lin.device)
            if self.posterior.free:
                moving["q.t"] = torch.zeros_like(moving["q.raw"][0])
        zeros = {name: torch.zeros_like(value) for name, value in moving.items()}
        return State(Natural.prior(M, self.posterior.lin.device), moving, zeros, dict(zeros))

    @property
    def _by_gradients(self) -> bool:
        return self.plan.averages.alpha > 0

    def _batches(self, epoch: int) -> Iterator[Batch]:
        if epoch == 0:
            return self.feed.in_order()
        return self.feed.minibatches(self.plan.batch_size, self.plan.seed * 1_000_003 + epoch)

    def _name(self, state: State) -> str:
        return "log p" if state.epoch == 0 else "bound"

    def _next_epoch(self, state: State) -> State:
        found = {"epoch": state.epoch, self._name(state).replace(" ", "_"): state.value / state.seen}
        self.history.append(found | settings(self.posterior))
        return replace(state, epoch=state.epoch + 1, batch=0, seen=0, value=0.0)

    # Steps

    def _step(self, state: State, batch: Batch) -> State:
        step = self._add_up if state.epoch == 0 else self._gradient_step if self._by_gradients else self._natural_step
        new, value = step(state, batch)
        n = len(batch.data)
        return replace(
            new,
            batch=state.batch + 1,
            seen=state.seen + n,
            step=state.step + (state.epoch > 0),
            value=state.value + n * value,
        )

    def _add_up(self, state: State, batch: Batch) -> tuple[State, float]:
        """Add what these points say at the network's own outputs."""
        q, value = state.q, 0.0
        with torch.no_grad():
            kernel, view = self.posterior.process.view(False, self.posterior.free)
            for piece in self.feed.pieces(batch, kernel):
                log_prob, found = laplace(self.posterior.likelihood, piece, view)
                q = Natural(q.P + found.H, q.h + found.b if view.free else q.h)
                value += log_prob.item() * self.feed.N / len(batch.data)
        return replace(state, q=q), value

    def _natural_step(self, state: State, batch: Batch) -> tuple[State, float]:
        scale = self.feed.N / len(batch.data)
        with torch.set_grad_enabled(bool(self.plan.learnt)):
            kernel, view = self.posterior.process.view(bool(self.plan.learnt), self.posterior.free)
            pieces = list(self.feed.pieces(batch, kernel))
            value, found = self._value(pieces, view, state.q, state), None
            bound = scale * value.total - state.q.kl()
        if self.plan.learnt:
            state = self._adam(state, bound + log_hyperprior(self.posterior), self.plan.learnt)
        with torch.no_grad():
            for E, q in value.parts:
                said = Statistics.of(q.W.detach(), E.r, E.curvature, q.mean.detach() - q.mu)
                found = said if found is None else found + said
            assert found is not None
            target, rate = found.natural(scale, view.free), self._rate(state.step, 1 / scale)
            if view.free:  # Newton's steps may be too long where Λ is small
                errors = sum(E.standard_error**2 for E, _ in value.parts) ** 0.5
                lowest = bound.item() - _TINY * (1 + abs(bound.item())) - scale * errors
                new = self._shortened(state, target, rate, lowest, pieces, view)
            else:
                new = state.q.toward(target, rate)
        return replace(state, q=new), bound.item()

    def _rate(self, step: int, share: float) -> float:
        """Return ρ: what the last epoch said counts, or less than that while mean or hyperparameters move."""
        moving = self.posterior.free or bool(self.plan.learnt)
        return min(_FIRST, max(share, (1 + step) ** -_DECAY if moving else 0.0))

    def _shortened(
        self, state: State, target: Natural, rate: float, lowest: float, pieces: list[Piece], view: View
    ) -> Natural:
        """Return a step so short that the bound, as this minibatch estimates it, does not fall below ``lowest``."""
        view = replace(view, w=view.w.detach(), L=view.L.detach())
        scale = self.feed.N / sum(len(piece.data) for piece in pieces)
        for _ in range(_HALVINGS):
            new = state.q.toward(target, rate)
            if scale * self._value(pieces, view, new, state).total - new.kl() >= lowest:
                break
            rate = rate / 2
        return new

    def _gradient_step(self, state: State, batch: Batch) -> tuple[State, float]:
        scale = self.feed.N / len(batch.data)
        leaves = {name: v.detach().requires_grad_() for name, v in state.moving.items() if name.startswith("q.")}
        with torch.enable_grad():
            kernel, view = self.posterior.process.view(bool(self.plan.learnt), self.posterior.free)
            q = _moved(state.q, leaves)
            pieces = list(self.feed.pieces(batch, kernel))
            energy = scale * self._value(pieces, view, q, state).total - q.kl()
            objective = energy + log_hyperprior(self.posterior) if self.plan.learnt else energy
        return self._adam(state, objective, leaves | self.plan.learnt), energy.item()

    def _value(self, pieces: list[Piece], view: View, q: WhitenedGaussian, state: State) -> "Value":
        """Return the likelihood's part on a minibatch."""
        # All data at once: the same draws in every step, so that steps converge.
        whole = self.feed.takes_all(self.plan.batch_size)
        seed = self.plan.seed if whole else self.plan.seed * 1_000_003 + state.step
        parts, total = [], torch.zeros((), dtype=torch.float64, device=self.posterior.lin.device)
        for i, piece in enumerate(pieces):
            marginals = view.marginals(piece.rows, q)
            E = self.plan.averages(self.posterior.likelihood, piece, marginals, seed + 7919 * i)
            parts.append((E, marginals))
            total = total + surrogate(E, marginals)
        return Value(total, parts)

    def _adam(self, state: State, objective: Tensor, leaves: dict[str, Any]) -> State:
        """Move what is learnt by Adam's step up the objective."""
        gradients = torch.autograd.grad(objective, list(leaves.values()), allow_unused=True)
        left = 1 - ((state.epoch - 1) + state.seen / self.feed.N) / max(1, self.plan.epochs - 1)
        rate, t = self.plan.rate * max(0.0, left), state.step + 1
        moving, first, second = dict(state.moving), dict(state.first), dict(state.second)
        with torch.no_grad():
            for (name, leaf), g in zip(leaves.items(), gradients, strict=True):
                g = torch.zeros_like(leaf) if g is None else g
                g = g.tril() if name == "q.raw" else g
                first[name] = torch.lerp(g, first[name], _MOMENTS[0])
                second[name] = torch.lerp(g.square(), second[name], _MOMENTS[1])
                up, size = first[name] / (1 - _MOMENTS[0] ** t), (second[name] / (1 - _MOMENTS[1] ** t)).sqrt()
                moving[name] = leaf.detach() + rate * up / (size + _TINY)
                if name in self.plan.learnt:
                    self.plan.learnt[name].copy_(moving[name])
        return replace(state, moving=moving, first=first, second=second)

    def _q(self, state: State) -> Natural:
        if not self._by_gradients:
            return state.q
        with torch.no_grad():
            return _moved(state.q, state.moving).natural()

    # States on disk

    def _save(self, state: State, file: Checkpoint) -> None:
        tensors = {"P": state.q.P, "h": state.q.h}
        for kind in ("moving", "first", "second"):
            tensors |= {f"{kind}.{name}": value.detach() for name, value in getattr(state, kind).items()}
        told = {name: str(getattr(state, name)) for name in ("epoch", "batch", "seen", "step")}
        file.save(tensors, told | {"value": repr(state.value), "history": json.dumps(self.history)})

    def _resumed(self, file: Checkpoint) -> State:
        tensors, told = file.load()
        device = self.posterior.lin.device
        tensors = {name: t.to(device) for name, t in tensors.items()}
        moving, first, second = (_under(f"{kind}.", tensors) for kind in ("moving", "first", "second"))
        with torch.no_grad():
            for name, parameter in self.plan.learnt.items():
                parameter.copy_(moving[name])
        self.history = json.loads(told["history"])
        epoch, batch, seen, step = (int(told[name]) for name in ("epoch", "batch", "seen", "step"))
        q = Natural(tensors["P"], tensors["h"])
        return State(q, moving, first, second, epoch, batch, seen, step, float(told["value"]))


@dataclass(frozen=True)
class Value:
    """The likelihood's part of an objective on a minibatch, and what it was made of, piece by piece."""

    total: Tensor  # ()
    parts: list[tuple[Expectation, Marginals]]


def _moved(q: Natural, coordinates: dict[str, Tensor]) -> Factored:
    near = Factored.near(q)
    return near.at(coordinates.get("q.t", near.t), coordinates["q.raw"])


def beside(path: str | Path | None, name: str) -> Path | None:
    """Return the file of another run of the same work."""
    return None if path is None else Path(path).with_name(f"{Path(path).name}.{name}")


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _digest(tensors: list[Tensor]) -> str:
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
