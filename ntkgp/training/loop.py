"""The loop that every objective is trained by: minibatches, progress, seeds, and a state that outlives the process."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer
from torch.utils.data import DataLoader, IterableDataset
from tqdm.auto import tqdm

from ntkgp.linearization import Linearization
from ntkgp.posteriors import Posterior
from ntkgp.posteriors.checkpoint import Checkpoint
from ntkgp.posteriors.data import Data, Source, as_source, shuffled
from ntkgp.posteriors.fit import first_input
from ntkgp.posteriors.tuning import hidden
from ntkgp.training.objective import Terms, WeightObjective

__all__ = ["Plan", "State", "checked_source", "fit"]

_EVERY = 500  # steps between checkpoints within an epoch
_FALL = 0.1  # what milestones multiply rates by


@dataclass(frozen=True)
class Plan:
    """How to train.

    Args:
        epochs: passes over the data.
        batch_size: points in a minibatch; a loader has its own.
        lr: learning rate of the weights.
        milestones: epochs from which rates are a tenth of what they were.
        seed: of order, labels and noise.
        optimizer: what makes an optimiser of groups of parameters.
    """

    epochs: int
    batch_size: int
    lr: float
    milestones: tuple[int, ...]
    seed: int
    optimizer: Callable[[list[dict[str, Any]]], Optimizer] = Adam

    def identity(self) -> dict[str, str]:
        """Return what tells this plan from others; epochs do not, so that a run may be prolonged."""
        return {name: str(getattr(self, name)) for name in ("batch_size", "lr", "milestones", "seed")}

    def rate(self, epoch: int) -> float:
        """Return what rates are multiplied by in an epoch."""
        return _FALL ** sum(epoch >= milestone for milestone in self.milestones)


@dataclass(frozen=True)
class State:
    """How far a run has come; weights and log σ are the objective's own, and what the optimiser knows is its own."""

    epoch: int = 0
    batch: int = 0  # minibatches of this epoch that are done
    seen: int = 0  # points of this epoch that are done
    step: int = 0  # minibatches in all
    sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)  # loss, log p, penalty and divergence of this epoch, times points


def fit(
    objective: WeightObjective,
    data: Any,
    epochs: int,
    batch_size: int = 128,
    lr: float = 1e-3,
    milestones: Sequence[int] = (),
    optimizer: Callable[[list[dict[str, Any]]], Optimizer] = Adam,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
    memory_budget: int = 4 << 30,
) -> Posterior:
    """Train an objective on data, and return the posterior it ends in.

    The network is trained in place and left in the mode it was in; every epoch is a line of ``objective.history``. A
    run that is stopped leaves the network where it was then; with a checkpoint it goes on, to the same bits.

    Args:
        objective: what to minimise.
        data: (X, y), a Dataset or a DataLoader.
        epochs: passes over the data.
        batch_size: points in a minibatch; a loader has its own.
        lr: learning rate of the weights; see ``parameter_groups`` for the others.
        milestones: epochs from which rates are a tenth of what they were.
        optimizer: what makes an optimiser of groups of parameters.
        checkpoint: a file that holds the state after every epoch; if it is there already, the run goes on from it.
        progress: whether to show a bar; by default in a terminal.
        memory_budget: bytes that the features of the posterior may take.

    Raises:
        RuntimeError: if the loss is not finite.
        ValueError: if a number is out of range, data do not fit, or the checkpoint belongs to another run.
    """
    if epochs < 1 or batch_size < 1 or not lr > 0:
        raise ValueError(f"epochs, batch_size and lr must be positive, but are {epochs}, {batch_size} and {lr}")
    lin, source = checked_source(objective, data)
    if objective.num_data is None:
        objective.num_data = _size(source)
    elif isinstance(source, Data) and len(source) != objective.num_data:
        raise ValueError(f"num_data is {objective.num_data}, but data have {len(source)} points")
    plan = Plan(epochs, batch_size, lr, tuple(milestones), objective.seed, optimizer)
    run = Run(objective, plan, lin, source)
    run.finish(None if checkpoint is None else Checkpoint(Path(checkpoint), run.identity()), progress)
    return objective._posterior(_linearization(objective, lin.example), source, memory_budget)


def checked_source(objective: WeightObjective, data: Any) -> tuple[Linearization, Source]:
    """Return the network, linearised where it is, and data that fit it."""
    lin = _linearization(objective, first_input(data))
    return lin, as_source(data, lin, objective.likelihood)


def _linearization(objective: WeightObjective, example: Any) -> Linearization:
    return Linearization(objective.net, list(objective.layout.names), example)


def _size(source: Source) -> int:
    if isinstance(source, DataLoader) and isinstance(source.dataset, IterableDataset):
        raise ValueError("num_data must be given, as a loader over an iterable dataset does not tell how many points")
    return len(source) if isinstance(source, Data) else len(source.dataset)  # type: ignore[arg-type]


class Run:
    """A run of an objective on data."""

    def __init__(self, objective: WeightObjective, plan: Plan, lin: Linearization, source: Source) -> None:
        self.objective, self.plan, self.lin, self.source = objective, plan, lin, source
        self.optimizer = plan.optimizer(objective.parameter_groups(plan.lr))
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def identity(self) -> dict[str, str]:
        """Return what tells this run from others."""
        return self.objective.identity() | {"optimizer": type(self.optimizer).__name__} | self.plan.identity()

    def finish(self, file: Checkpoint | None, progress: bool | None) -> None:
        """Run to the end, from the start or from what the file holds."""
        N, epochs, net = self.objective._size(), self.plan.epochs, self.objective.net
        state, training = State(), net.training
        if file is not None and file.path.exists():
            state = self._resumed(file)
        else:
            self.objective.history = []
        done = state.epoch * N + state.seen
        try:
            net.train()
            with tqdm(total=epochs * N, initial=done, desc="train", unit="points", disable=hidden(progress)) as bar:
                while state.epoch < epochs and not self.objective.finished:
                    for data in islice(self._batches(state.epoch), state.batch, None):
                        state = self._step(state, data)
                        bar.update(len(data))
                        bar.set_postfix_str(f"loss {state.sums[0] / state.seen:.5g}", refresh=False)
                        if file is not None and state.step % _EVERY == 0:
                            self._save(state, file)
                    state = self._next_epoch(state)
                    if file is not None:
                        self._save(state, file)
            self.objective.settle()
        finally:
            net.train(training)

    def _batches(self, epoch: int) -> Iterator[Data]:
        generator = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + epoch)
        return shuffled(self.source, self.plan.batch_size, generator, self.lin, self.objective.likelihood)

    def _step(self, state: State, data: Data) -> State:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * self.plan.rate(state.epoch)
        self.optimizer.zero_grad()
        terms = self._terms(state.step, data)
        if not torch.isfinite(terms.loss):
            raise RuntimeError(
                f"the loss is {terms.loss.item()} at step {state.step}: try a smaller lr than {self.plan.lr}"
            )
        terms.loss.backward()
        self.objective.before_step(data.x, data.y)
        self.optimizer.step()
        n = len(data)
        new = [t.item() for t in (terms.loss, terms.log_prob, terms.penalty, terms.divergence)]
        sums = tuple(total + n * value for total, value in zip(state.sums, new, strict=True))
        return replace(state, batch=state.batch + 1, seen=state.seen + n, step=state.step + 1, sums=sums)

    def _terms(self, step: int, data: Data) -> Terms:
        """Return the terms of a minibatch; what is random in them, dropout included, is known by the step."""
        device, seed = self.lin.device, self.plan.seed * 1_000_003 + step
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            torch.manual_seed(seed)
            return self.objective.terms(data.x, data.y, torch.Generator(device).manual_seed(seed))

    def _next_epoch(self, state: State) -> State:
        names = ("loss", "log_prob", "penalty", "divergence")
        found = {name: total / state.seen for name, total in zip(names, state.sums, strict=True)}
        told = self.objective.after_epoch(state.epoch, self.lin, self.source)
        self.objective.history.append({"epoch": state.epoch} | found | told)
        return State(epoch=state.epoch + 1, step=state.step)

    # States on disk

    def _save(self, state: State, file: Checkpoint) -> None:
        tensors = {f"objective.{name}": t for name, t in self.objective.state_dict().items()}
        numbers: dict[str, Any] = {}
        for i, known in self.optimizer.state_dict()["state"].items():
            for name, value in known.items():
                (tensors if isinstance(value, Tensor) else numbers)[f"optimizer.{i}.{name}"] = value
        told = {name: str(getattr(state, name)) for name in ("epoch", "batch", "seen", "step")}
        told |= {"sums": json.dumps(state.sums), "numbers": json.dumps(numbers)}
        file.save({name: t.detach().clone() for name, t in tensors.items()}, told | {"history": self._history()})

    def _history(self) -> str:
        return json.dumps(self.objective.history)

    def _resumed(self, file: Checkpoint) -> State:
        tensors, told = file.load()
        known: dict[str, Any] = tensors | json.loads(told["numbers"])
        own = {name.removeprefix("objective."): t for name, t in tensors.items() if name.startswith("objective.")}
        # Checkpoints from before likelihoods had temperatures have none.
        self.objective.load_state_dict(self.objective.state_dict() | own)
        state: dict[int, dict[str, Any]] = {}
        for name, value in known.items():
            if name.startswith("optimizer."):
                _, i, key = name.split(".", 2)
                state.setdefault(int(i), {})[key] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.objective.history = json.loads(told["history"])
        epoch, batch, seen, step = (int(told[name]) for name in ("epoch", "batch", "seen", "step"))
        return State(epoch, batch, seen, step, tuple(json.loads(told["sums"])))
