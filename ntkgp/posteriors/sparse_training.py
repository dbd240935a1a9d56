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

from ntkgp.posteriors.bound import Averages, Statistics
from ntkgp.posteriors.checkpoint import Checkpoint
from ntkgp.posteriors.feed import Batch
from ntkgp.posteriors.sparse_steps import Adam, Steps
from ntkgp.posteriors.tuning import hidden, log_hyperprior, settings
from ntkgp.posteriors.whitened import Factored, Natural

if TYPE_CHECKING:
    from ntkgp.posteriors.sparse import VariationalPosterior

__all__ = ["Plan", "beside", "train"]

_EVERY = 100  # steps between checkpoints within an epoch
_LARGEST, _DECAY = 0.5, 0.6  # rates of natural steps: the largest, and the power of 1 / (steps so far) they fall with


@dataclass(frozen=True)
class Plan:
    """How to train.

    Args:
        averages: how the likelihood is averaged. For powers of it natural-gradient steps for its logarithm come first,
            then, for the second half of the epochs, Adam's.
        epochs: passes over the data, the first of them for what the data say at the network's own outputs.
        batch_size: points in a minibatch, None for all; a loader has its own.
        seed: of order and draws.
        rate: of Adam's first steps, falling linearly to zero.
        learnt: hyperparameters, and inducing points, to be learnt with q.
        anchored: whether ½ ‖θ* − m₀‖²_{S₀⁻¹} counts for them, the share of θ* in the divergence of the weights.
    """

    averages: Averages
    epochs: int
    batch_size: int | None
    seed: int
    rate: float
    learnt: dict[str, nn.Parameter] = field(default_factory=dict)
    anchored: bool = False

    def identity(self) -> dict[str, str]:
        """Return what tells this plan from others."""
        told = {
            name: str(getattr(self, name)) for name in ("averages", "epochs", "batch_size", "seed", "rate", "anchored")
        }
        return told | {"learnt": ", ".join(self.learnt)}

    @property
    def adam_from(self) -> int:
        """The first epoch that has Adam's steps, if any has."""
        return 1 + self.epochs // 2 if self.averages.alpha > 0 else 1

    def kind(self, epoch: int, whole: bool) -> str:
        """Return what an epoch is for.

        Args:
            epoch: which.
            whole: whether a minibatch has all points.
        """
        if epoch == 0:
            return "network"
        if self.averages.alpha > 0:
            return "gradient" if epoch >= self.adam_from else "natural"
        closes = epoch > 1 and epoch == self.epochs - 1 and not whole and not self.learnt
        return "closing" if closes else "natural"


@dataclass(frozen=True)
class State:
    """How far a run has come."""

    q: Natural  # or, while Adam moves q, where its coordinates have their origin
    sums: Statistics  # what this epoch has added up, if it is one that adds up
    moving: dict[str, Tensor]  # what Adam moves: hyperparameters, and coordinates of q
    adam: Adam
    epoch: int = 0
    batch: int = 0  # minibatches of this epoch that are done
    seen: int = 0  # points of this epoch that are done
    step: int = 0  # minibatches in all after the first epoch
    value: float = 0.0  # the objective's estimates in this epoch, each times its number of points


def train(
    posterior: "VariationalPosterior", plan: Plan, checkpoint: str | Path | None = None, progress: bool | None = None
) -> tuple[Natural, list[dict[str, Any]]]:
    r"""Return the q that maximises the bound, or a power of the likelihood in its place, and what each epoch saw.

    The first epoch goes through the data once and adds up P = I + Σ Wᵀ Λ W and h = Σ Wᵀ(r + Λ(f − μ)) at the network's
    own outputs f: for Gaussian noise that is the optimum already. From there natural-gradient steps

    .. math:: P \leftarrow (1-\rho) P + \rho \big(I + \tfrac{N}{n} \sum W^\top E[\Lambda] W\big), \qquad
       h \leftarrow (1-\rho) h + \rho \tfrac{N}{n} \sum W^\top (E[r] + E[\Lambda] W m)

    with ρ = n/N, so that the last epoch counts, or where mean or hyperparameters move, falling from ½; h stays 0 for a
    fixed mean. The last epoch adds up again, with expectations under q as it then is, which leaves no noise of
    minibatches. In whitened coordinates the divergence does not know the hyperparameters: their gradient is that of the
    likelihood's part alone.

    Args:
        posterior: which process, likelihood and data; hyperparameters that ``plan`` names change in place.
        plan: how.
        checkpoint: a file that holds the state; if it is there already, the run goes on from it.
        progress: whether to show a bar; by default in a terminal.

    Raises:
        ValueError: if the checkpoint belongs to another run.
    """
    before = {name: p.detach().clone() for name, p in plan.learnt.items()}
    learning = bool(plan.learnt)
    run = Run(posterior, plan, Steps(posterior, posterior.process.feed(learning), learning))
    file = None if checkpoint is None else Checkpoint(Path(checkpoint), run.identity())
    try:
        return run.finish(file, progress)
    except BaseException:
        with torch.no_grad():
            for name, value in before.items():
                plan.learnt[name].copy_(value)
        raise


def beside(path: str | Path | None, name: str) -> Path | None:
    """Return the file of another run of the same work."""
    return None if path is None else Path(path).with_name(f"{Path(path).name}.{name}")


@dataclass
class Run:
    """A run; all that changes is in its states, and in the hyperparameters it learns."""

    posterior: "VariationalPosterior"
    plan: Plan
    steps: Steps
    history: list[dict[str, Any]] = field(default_factory=list)

    def identity(self) -> dict[str, str]:
        """Return what tells this run from others: network, data, process, hyperparameters and plan."""
        post = self.posterior
        return {
            "fingerprint": post.lin.fingerprint(),
            "points": str(post.process.N),
            "mean": post.mean,
            "nugget": repr(post.process.nugget),
            "hyperparameters": _digest([*post.parameters(), *post.buffers()]),
        } | self.plan.identity()

    def finish(self, file: Checkpoint | None, progress: bool | None) -> tuple[Natural, list[dict[str, Any]]]:
        """Run to the end, from the start or from what the file holds."""
        N, epochs = self.steps.feed.N, self.plan.epochs
        state = self._start() if file is None or not file.path.exists() else self._resumed(file)
        done = state.epoch * N + state.seen
        with tqdm(total=epochs * N, initial=done, desc="train", unit="points", disable=hidden(progress)) as bar:
            while state.epoch < epochs:
                for batch in islice(self._batches(state.epoch), state.batch, None):
                    state = self._step(state, batch)
                    bar.update(len(batch.data))
                    bar.set_postfix_str(f"{self._name(state.epoch)} {state.value / state.seen:.5g}", refresh=False)
                    if file is not None and state.batch % _EVERY == 0:
                        self._save(state, file)
                state = self._next_epoch(state)
                if file is not None:
                    self._save(state, file)
        return self._q(state), self.history

    def _start(self) -> State:
        M, device = self.posterior.num_inducing, self.posterior.lin.device
        q = Natural.prior(M, device)
        moving = {name: p.detach().clone() for name, p in self.plan.learnt.items()}
        if self.plan.averages.alpha > 0:
            moving["q.raw"] = torch.zeros_like(q.P)
            if self.posterior.free:
                moving["q.t"] = torch.zeros_like(q.h)
        return State(q, Statistics.nothing(M, device), moving, Adam.at_rest(moving))

    def _kind(self, epoch: int) -> str:
        return self.plan.kind(epoch, self.steps.feed.takes_all(self.plan.batch_size))

    def _batches(self, epoch: int) -> Iterator[Batch]:
        if self._kind(epoch) in ("network", "closing"):
            return self.steps.feed.in_order()
        return self.steps.feed.minibatches(self.plan.batch_size, self.plan.seed * 1_000_003 + epoch)

    def _name(self, epoch: int) -> str:
        return {"network": "log_p", "gradient": "energy"}.get(self._kind(epoch), "bound")

    def _seed(self, state: State) -> int:
        """Return the seed of the draws: the same in every step where these see all data, so that they converge."""
        whole = self.steps.feed.takes_all(self.plan.batch_size)
        return self.plan.seed if whole else self.plan.seed * 1_000_003 + state.step

    def _step(self, state: State, batch: Batch) -> State:
        kinds = {"network": self._add, "closing": self._add_under_q, "natural": self._natural, "gradient": self._climb}
        new, value = kinds[self._kind(state.epoch)](state, batch)
        n, counts = len(batch.data), state.epoch > 0
        seen, total = state.seen + n, state.value + n * value
        return replace(new, batch=state.batch + 1, seen=seen, step=state.step + counts, value=total)

    def _add(self, state: State, batch: Batch) -> tuple[State, float]:
        value, said = self.steps.on(batch).at_network()
        return replace(state, sums=state.sums + said), value

    def _add_under_q(self, state: State, batch: Batch) -> tuple[State, float]:
        with torch.no_grad():
            found = self.steps.on(batch).under(state.q, self._logarithm, self._seed(state))
        assert found.said is not None
        return replace(state, sums=state.sums + found.said), found.value.item()

    @property
    def _logarithm(self) -> Averages:
        """E[log p], whatever the objective."""
        return replace(self.plan.averages, alpha=0.0)

    def _natural(self, state: State, batch: Batch) -> tuple[State, float]:
        learnt = self.plan.learnt if self.plan.averages.alpha == 0 else {}  # an α-energy's are learnt by itself
        seed = self._seed(state)
        with torch.set_grad_enabled(bool(learnt)):
            measure = self.steps.on(batch, bool(learnt))
            found = measure.under(state.q, self._logarithm, seed)
            objective = found.value + self._hyperprior()
        value = found.value.item()
        if not torch.isfinite(found.value):  # a mean so far out that the likelihood overflows is brought back
            return replace(state, q=Natural(state.q.P, state.q.h / 2)), value
        falls = (self.posterior.free or learnt) and measure.scale > 1
        rate = min(_LARGEST, (1 + state.step) ** -_DECAY if falls else 1 / measure.scale)
        q = measure.natural_step(state.q, found, rate, self._logarithm, seed)
        if learnt:
            state = self._adam(state, objective, dict(learnt))
        return replace(state, q=q), value

    def _climb(self, state: State, batch: Batch) -> tuple[State, float]:
        coordinates = {k: v.detach().requires_grad_() for k, v in state.moving.items() if k.startswith("q.")}
        with torch.enable_grad():
            measure = self.steps.on(batch, bool(self.plan.learnt))
            found = measure.under(_moved(state.q, coordinates), self.plan.averages, self._seed(state), False)
            objective = found.value + self._hyperprior()
        return self._adam(state, objective, coordinates | self.plan.learnt), found.value.item()

    def _hyperprior(self) -> Tensor | float:
        """Return what else the objective has of the hyperparameters."""
        anchor = self.posterior.distance_to_prior() if self.plan.anchored else 0.0
        return log_hyperprior(self.posterior) - anchor if self.plan.learnt else 0.0

    def _adam(self, state: State, objective: Tensor, leaves: dict[str, Tensor]) -> State:
        """Move ``leaves`` up the objective, hyperparameters in place."""
        found = torch.autograd.grad(objective, list(leaves.values()), materialize_grads=True)
        gradients = {k: g.tril() if k == "q.raw" else g for k, g in zip(leaves, found, strict=True)}
        epochs = self.plan.epochs - self.plan.adam_from
        past = (state.epoch - self.plan.adam_from + state.seen / self.steps.feed.N) / max(1, epochs)
        steps, adam = state.adam.step(gradients, self.plan.rate * max(0.0, 1 - past))
        moving = state.moving | {k: leaves[k].detach() + step for k, step in steps.items()}
        with torch.no_grad():
            for name, parameter in self.plan.learnt.items():
                parameter.copy_(moving[name])
        return replace(state, moving=moving, adam=adam)

    def _next_epoch(self, state: State) -> State:
        found = {"epoch": state.epoch, self._name(state.epoch): state.value / state.seen}
        self.history.append(found | settings(self.posterior))
        kind, q = self._kind(state.epoch), state.q
        state = replace(state, epoch=state.epoch + 1, batch=0, seen=0, value=0.0)
        if kind not in ("network", "closing"):
            return state
        q, nothing = state.sums.natural(1.0, self.posterior.free), Statistics.nothing(len(q.h), q.h.device)
        if kind == "network":
            q = self.steps.on(next(self._batches(1))).best_start(q, self._logarithm, self._seed(state))
        return replace(state, q=q, sums=nothing)

    def _q(self, state: State) -> Natural:
        if self._kind(self.plan.epochs - 1) != "gradient":
            return state.q
        with torch.no_grad():
            return _moved(state.q, state.moving).natural()

    # States on disk

    def _save(self, state: State, file: Checkpoint) -> None:
        tensors = {"P": state.q.P, "h": state.q.h, "H": state.sums.H, "b": state.sums.b}
        kinds = {"moving": state.moving, "first": state.adam.first, "second": state.adam.second}
        tensors |= {f"{kind}.{name}": t for kind, found in kinds.items() for name, t in found.items()}
        told = {name: str(getattr(state, name)) for name in ("epoch", "batch", "seen", "step")}
        told |= {"moves": str(state.adam.moves), "value": repr(state.value), "history": json.dumps(self.history)}
        file.save(tensors, told)

    def _resumed(self, file: Checkpoint) -> State:
        tensors, told = file.load()
        tensors = {name: t.to(self.posterior.lin.device) for name, t in tensors.items()}
        moving, first, second = (_under(f"{kind}.", tensors) for kind in ("moving", "first", "second"))
        with torch.no_grad():
            for name, parameter in self.plan.learnt.items():
                parameter.copy_(moving[name])
        self.history = json.loads(told["history"])
        epoch, batch, seen, step = (int(told[name]) for name in ("epoch", "batch", "seen", "step"))
        q, sums = Natural(tensors["P"], tensors["h"]), Statistics(tensors["H"], tensors["b"])
        adam = Adam(first, second, int(told["moves"]))
        return State(q, sums, moving, adam, epoch, batch, seen, step, float(told["value"]))


def _moved(q: Natural, coordinates: dict[str, Tensor]) -> Factored:
    near = Factored.near(q)
    return near.at(coordinates.get("q.t", near.t), coordinates["q.raw"])


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _digest(tensors: list[Tensor]) -> str:
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
