"""Hyperparameters by evidence, or by a score on validation data. The network is not differentiated again."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ntkgp.evidence import derivative_in_logarithm, maximise, noise_step, precision_step
from ntkgp.likelihoods import Gaussian, Likelihood, TemperedLikelihood
from ntkgp.linearization.inputs import Input, batch_size
from ntkgp.posteriors.data import Data, as_source, gather
from ntkgp.posteriors.prediction import Prediction, predictive_of

if TYPE_CHECKING:
    from ntkgp.posteriors.base import Posterior

__all__ = ["by_evidence", "hidden", "log_hyperprior", "predictor", "settings", "squared_errors", "tune", "validate"]

_FAR = 1.0  # nats a target
_SAMPLES = 256  # a validation point
_ROUNDS = 20  # evaluations of Λ at the linear mode


def tune(
    posteriors: Sequence["Posterior"],
    at: str | None = None,
    validation: Any = None,
    grid: Tensor | None = None,
    temperatures: Sequence[float] | Tensor | None = None,
    progress: bool | None = None,
    **options: Any,
) -> None:
    """Tune each posterior by its own evidence, or all of them by a score of their mixture on validation data.

    On validation data all precisions are multiplied by each value of ``grid``, under each of ``temperatures``, and what
    has the best mean log predictive density stays. Every step is a line of ``posterior.history``. If anything fails,
    the hyperparameters of all are as they were.

    Args:
        posteriors: whose priors and likelihoods to tune, in place.
        at: where the evidence is evaluated, "linear_mode" or "map".
        validation: (X, y), a Dataset or a DataLoader.
        grid: factors for the precisions, 10⁻⁴ to 10⁴ by default.
        temperatures: of a likelihood that has one, for validation data to choose from; by default it stays as it is.
        progress: whether to show a bar; by default in a terminal.
        options: of the evidence, see :func:`by_evidence`, or what takes its place in a posterior of this kind.

    Raises:
        ValueError: if an option is for the other of the two ways, there is nothing to tune, or a name is not known.
    """
    if validation is not None:
        for name, value in ({"at": at} | options).items():
            if value is not None:
                raise ValueError(f"{name}={value!r} is for tuning by evidence, but validation is given")
        validate(posteriors, validation, grid, temperatures, progress)
        return
    for name, choices in (("grid", grid), ("temperatures", temperatures)):
        if choices is not None:
            raise ValueError(f"{name}: for validation data to choose from, but validation is None")
    if at is not None:
        options["at"] = at
    with _unless_it_fails(posteriors):
        for posterior in posteriors:
            posterior._tune_by_evidence(progress=progress, **options)


@contextmanager
def _unless_it_fails(posteriors: Sequence["Posterior"]) -> Iterator[None]:
    """Put hyperparameters back where they were if something is raised."""
    before = [(p, p.detach().clone()) for posterior in posteriors for p in posterior.parameters()]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for parameter, value in before:
                parameter.copy_(value)
        raise


def by_evidence(
    posterior: "Posterior",
    at: str = "linear_mode",
    steps: int = 50,
    curvature_at: str = "map",
    method: str = "gradient",
    search: dict[str, Any] | None = None,
    progress: bool | None = None,
) -> None:
    """Maximise the evidence over all hyperparameters that require gradients.

    By quasi-Newton steps over the raw parameters, their logarithms, or by MacKay's fixed point.

    Args:
        posterior: whose prior and likelihood to tune, in place.
        at: where the evidence is evaluated, "linear_mode" or "map".
        steps: at most so many steps; with ``curvature_at="linear_mode"`` so many after each evaluation of Λ.
        curvature_at: where Λ is evaluated: "map" for where the posterior has it; "linear_mode" alternates between
            tuning with Λ fixed and evaluating it at the new mode, to a point where both stay.
        method: "gradient", or "fixed_point" for precisions and Gaussian noise, which also logs γ, the effective number
            of parameters of each group.
        search: how to find the linear mode where the exact one is too dear, as the options of
            :meth:`Posterior.search`; the fixed point takes it, which does not mind an inexact mode.
        progress: whether to show a bar; by default in a terminal.

    Raises:
        ValueError: if there is nothing to tune, or a name is not known.
    """
    if at not in ("linear_mode", "map"):
        raise ValueError(f'at must be "linear_mode" or "map", but is {at!r}')
    if curvature_at not in ("linear_mode", "map"):
        raise ValueError(f'curvature_at must be "linear_mode" or "map", but is {curvature_at!r}')
    if method not in ("gradient", "fixed_point"):
        raise ValueError(f'method must be "gradient" or "fixed_point", but is {method!r}')
    if search and method != "fixed_point":
        raise ValueError('search is for method="fixed_point": a line search needs the exact mode')
    search = search or {}
    hyperparameters = [p for p in posterior.parameters() if p.requires_grad]
    if not hyperparameters:
        raise ValueError("there is nothing to tune: no hyperparameter of prior and likelihood requires gradients")
    tolerance = 1e-6 if hyperparameters[0].dtype == torch.float64 else 1e-4
    climb = _climb if method == "gradient" else _iterate
    with tqdm(desc="tune", disable=hidden(progress)) as bar:
        if curvature_at == "map":
            for found in climb(Objective(posterior, at, posterior, search), hyperparameters, steps, tolerance):
                _log(posterior, found, bar)
        else:
            for _ in range(_ROUNDS):
                start = [p.detach().clone() for p in hyperparameters]
                there = posterior._at(posterior.linear_mode(**search).delta)
                for found in climb(Objective(posterior, at, there, search), hyperparameters, steps, tolerance):
                    _log(posterior, found, bar)
                moved = max((p.detach() - p0).abs().max().item() for p, p0 in zip(hyperparameters, start, strict=True))
                if moved <= tolerance**0.5:
                    break
    if at == "linear_mode" and posterior.shift is None:
        _warn_if_far(posterior)


@dataclass(frozen=True)
class Objective:
    """The log evidence with Λ where ``curvature`` has it, and the log density of hyperpriors."""

    posterior: "Posterior"
    at: str
    curvature: "Posterior"
    search: dict[str, Any]  # how to find the mode

    def log_joint(self) -> Tensor:
        """Return log p(y | f_lin(θ)) − ½ ‖θ − m₀‖²_{S₀⁻¹}."""
        if self.at == "linear_mode":
            return self.posterior._log_joint_at_mode(**self.search)
        return self.posterior._log_joint(self.delta())

    def delta(self) -> Tensor:  # (P,)
        """Return θ − θ* where the evidence is evaluated."""
        if self.at == "map":
            return torch.zeros_like(self.posterior.lin.theta)
        return self.posterior.linear_mode(**self.search).delta

    def log_det(self) -> Tensor:
        """Return log |B|."""
        return self.curvature._log_det()

    def __call__(self) -> Tensor:
        return self.log_joint() - self.log_det() / 2 + log_hyperprior(self.posterior)


def _climb(
    objective: Objective, hyperparameters: list[nn.Parameter], steps: int, tolerance: float
) -> Iterator[dict[str, Any]]:
    for step in maximise(objective, hyperparameters, steps, tolerance):
        yield {"log_evidence": step.value, "gradient_norm": step.gradient_norm}


def _iterate(
    objective: Objective, hyperparameters: list[nn.Parameter], steps: int, tolerance: float
) -> Iterator[dict[str, Any]]:
    """Repeat MacKay's steps until no logarithm moves by more than the tolerance."""
    posterior = objective.posterior
    prior, likelihood = posterior.prior, posterior.likelihood
    known = {id(getattr(prior, "raw_precision", None)), id(_raw_noise(likelihood))}
    if {id(p) for p in hyperparameters} - known or any(posterior.named_priors()):
        raise ValueError(
            'method="fixed_point" is for precisions and Gaussian noise without hyperpriors: use method="gradient"'
        )
    learnt = {id(p) for p in hyperparameters}
    for _ in range(steps):
        with torch.enable_grad():
            log_joint, log_det = objective.log_joint(), objective.log_det()
        found: dict[str, Any] = {"log_evidence": (log_joint - log_det / 2).item()}
        new: list[tuple[Any, str, Tensor]] = []
        if id(getattr(prior, "raw_precision", None)) in learnt:
            gamma = -derivative_in_logarithm(log_det, prior, "precision")
            q = -2 * derivative_in_logarithm(log_joint, prior, "precision")
            new.append((prior, "precision", precision_step(prior.precision.detach(), gamma, q)))
            found["effective_parameters"] = gamma.tolist()
        if id(_raw_noise(likelihood)) in learnt:
            squares, n = squared_errors(posterior, objective.delta())
            if likelihood.noise.numel() == 1:
                squares, n = squares.sum(), n.sum()
            determined = -derivative_in_logarithm(log_det, likelihood, "noise")
            new.append((likelihood, "noise", noise_step(squares, n, determined)))
        yield found
        moved = max((value / getattr(owner, name).detach()).log().abs().max().item() for owner, name, value in new)
        for owner, name, value in new:
            setattr(owner, name, value)
        if moved <= tolerance:
            return


def _raw_noise(likelihood: Likelihood) -> nn.Parameter | None:
    return likelihood.raw_noise if isinstance(likelihood, Gaussian) else None


def squared_errors(posterior: "Posterior", delta: Tensor) -> tuple[Tensor, Tensor]:  # (P,) -> (C,), (C,)
    """Return ‖y − f_lin‖² of each output, and how many targets it has; weights counted, over all processes."""
    total = torch.zeros(2, posterior.lin.num_outputs, dtype=posterior.lin.dtype, device=posterior.lin.device)
    with torch.no_grad():
        for chunk in posterior.model:
            squares, w = (chunk.data.y - posterior._moved(chunk, delta)).square(), chunk.data.weights
            w = torch.ones_like(squares) if w is None else w.view(len(w), -1).expand_as(squares)
            total += torch.stack([(w * squares).sum(0), w.sum(0)])
    squares, n = posterior.model.summed(total)
    return squares, n


def _log(posterior: "Posterior", found: dict[str, Any], bar: tqdm) -> None:
    posterior.history.append(found | settings(posterior))
    bar.set_postfix(log_evidence=f"{found['log_evidence']:.4g}")
    bar.update()


def _warn_if_far(posterior: "Posterior") -> None:
    """Say so if the tuned linear model explains the data far better than the network, where the mean still is."""
    gain = posterior._gain_at_mode()
    if gain is None:
        return
    gain /= sum(chunk.data.y.numel() for chunk in posterior.model)
    if gain > _FAR:
        warnings.warn(
            f"the mode of the linear model gains {gain:.1f} nats a target over the network itself: the network is not "
            "at its mode, and hyperparameters (noise above all) were tuned for the linear model. Train on, use "
            'post.refine(), or tune(at="map")',
            stacklevel=5,
        )


def log_hyperprior(posterior: "Posterior") -> Tensor | float:
    """Return the log density of the hyperparameters that have a prior of their own."""
    total: Tensor | float = 0.0
    for _, module, prior, closure, _ in posterior.named_priors():
        total = total + prior.log_prob(closure(module)).sum()
    return total


def validate(
    posteriors: Sequence["Posterior"],
    validation: Any,
    grid: Tensor | None = None,
    temperatures: Sequence[float] | Tensor | None = None,
    progress: bool | None = None,
) -> None:
    """Multiply all precisions of all posteriors by the factor under which their mixture predicts best.

    Args:
        posteriors: under likelihoods of one kind; moved in place, unless anything fails.
        validation: as :func:`tune` takes it.
        grid: the same.
        temperatures: the same.
        progress: whether to show a bar.

    Raises:
        ValueError: if there is nothing to tune.
    """
    for posterior in posteriors:
        if not hasattr(posterior.prior, "precision"):
            kind = type(posterior.prior).__name__
            raise ValueError(f"a grid needs a prior with precisions, but {kind} has none: tune by evidence")
        if temperatures is not None and not isinstance(posterior.likelihood, TemperedLikelihood):
            kind = type(posterior.likelihood).__name__
            raise ValueError(f"temperatures need a likelihood that has one, but {kind} has none")
    first = posteriors[0]
    data = gather(as_source(validation, first.lin, first.likelihood), first.lin, first.likelihood)
    factors = (torch.logspace(-4, 4, 17) if grid is None else torch.as_tensor(grid)).tolist()
    heats = [None] if temperatures is None else _numbers(temperatures)
    with _unless_it_fails(posteriors):
        _on_validation(posteriors, data, factors, heats, progress)


def _on_validation(
    posteriors: Sequence["Posterior"],
    data: Data,
    factors: list[float],
    heats: Sequence[float | None],
    progress: bool | None,
) -> None:
    start = [posterior.prior.precision.detach().clone() for posterior in posteriors]
    parts = max((_parts(posterior, data) for posterior in posteriors), key=len)
    whole = [(_together(posteriors, data.x), data.y)] if len(parts) == 1 else None
    scores: list[float] = []

    def move(heat: float | None, factor: float) -> None:
        for posterior, precision in zip(posteriors, start, strict=True):
            posterior.prior.precision = precision * factor
            if heat is not None:
                posterior.likelihood.temperature = heat

    tried = list(product(heats, factors))
    with tqdm(desc="tune", total=len(tried) * len(parts), disable=hidden(progress)) as bar:
        for heat in heats:  # first, as statistics of weight space depend on temperatures
            sums = [0.0] * len(factors)
            for log_prob, y in whole or ((_together(posteriors, part.x), part.y) for part in parts):
                for i, factor in enumerate(factors):
                    move(heat, factor)
                    sums[i] += log_prob(y).mean().item() * len(y)
                    bar.update()
            for factor, total in zip(factors, sums, strict=True):
                move(heat, factor)
                scores.append(total / len(data))
                for posterior in posteriors:
                    posterior.history.append({"validation_log_prob": scores[-1]} | settings(posterior))
    if all(score != score for score in scores):
        raise RuntimeError("the validation score is not a number for any precision of the grid")
    move(*tried[max(range(len(scores)), key=lambda i: scores[i] if scores[i] == scores[i] else -float("inf"))])


def _together(posteriors: Sequence["Posterior"], x: Input) -> Callable[[Tensor], Tensor]:
    """Return log p(y) of points under the mixture, at the hyperparameters of the moment."""
    members = [predictor(posterior, x) for posterior in posteriors]

    def log_prob(y: Tensor) -> Tensor:
        return torch.stack([predict().log_prob(y) for predict in members]).logsumexp(0) - math.log(len(members))

    return log_prob


def _parts(posterior: "Posterior", data: Data) -> list[Data]:
    """Return the points in parts whose features fit the budget, for the network to be asked once for each point.

    Where other hyperparameters cost a factorisation, all points are one part, which may be asked for again and again.
    """
    fits = posterior.model.memory_budget // posterior.model._bytes_each
    if not posterior._moves_cheaply or len(data) <= fits or fits < posterior._batch(data.x):
        return [data]
    return [data[start : start + fits] for start in range(0, len(data), fits)]


def _numbers(temperatures: Sequence[float] | Tensor) -> list[float]:
    found = temperatures.flatten().tolist() if isinstance(temperatures, Tensor) else list(temperatures)
    if not found:
        raise ValueError("temperatures must be one number or more, but is empty")
    return found


def predictor(posterior: "Posterior", x: Input) -> Callable[[], Prediction]:
    """Return what predicts under the hyperparameters of the moment, from what is kept of the points if that fits."""
    with torch.no_grad():
        remembered = posterior._memory(batch_size(x))
        if remembered is None:
            return lambda: posterior.predict(x, progress=False)
        latents = [remembered(part) for part in posterior._predicted_together(x)]

    def predict() -> Prediction:
        with torch.no_grad():
            generator = torch.Generator(posterior.lin.device).manual_seed(0)
            return predictive_of(posterior.likelihood, (latent() for latent in latents), None, _SAMPLES, generator)

    return predict


def settings(posterior: "Posterior") -> dict[str, Any]:
    """Return precisions, noise and temperature, for the history."""
    found = {}
    for name in ("precision", "noise", "temperature"):
        for owner in (posterior.prior, posterior.likelihood):
            value = getattr(owner, name, None)
            if isinstance(value, Tensor):
                found[name] = value.detach().tolist()
    return found


def hidden(progress: bool | None) -> bool | None:
    """Translate for tqdm, whose None means: in a terminal only."""
    return None if progress is None else not progress
