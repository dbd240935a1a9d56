"""Sample-based expectation maximisation: hyperparameters of models too large to factorise."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ntkgp.evidence import noise_step, precision_step
from ntkgp.likelihoods import Gaussian
from ntkgp.posteriors.checkpoint import Checkpoint
from ntkgp.posteriors.tuning import hidden, squared_errors

if TYPE_CHECKING:
    from ntkgp.posteriors.sampled import SampledPosterior

__all__ = ["maximise_expectation"]

_DETERMINED = 0.9  # of the data: beyond, n − γ̂ is no better than its error


def maximise_expectation(
    posterior: "SampledPosterior",
    at: str = "linear_mode",
    steps: int = 10,
    tolerance: float = 1e-2,
    search: dict[str, Any] | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> None:
    r"""Alternate between θ_⋆ with S samples (E) and MacKay's step with their estimate of γ (M).

    α_g ← α_g γ̂_g / q_g and, for Gaussian noise, σ² ← ‖y − f‖² / (n − γ̂) (Antorán et al. 2023), or if γ̂ is near n,
    (‖y − f‖² + σ² γ̂) / n, which is slower and has the same fixed point. The noise of the samples
    is kept, so that steps do not jitter, and every solve starts at the last one. Each step is a line of
    ``posterior.history`` with γ̂, its standard error, residuals and iterations.

    Args:
        posterior: whose prior and likelihood to tune, in place.
        at: which mode is compared with the prior, "linear_mode" or "map".
        steps: at most so many.
        tolerance: stop when no logarithm of a hyperparameter moves by more.
        search: how to find the linear mode, as the options of :meth:`Posterior.search`; by default Newton's method.
        checkpoint: a file that holds the state after every step; if it is there already, the run goes on from it.
        progress: whether to show a bar; by default in a terminal.

    Raises:
        ValueError: if a hyperparameter is not a precision or Gaussian noise, or the checkpoint belongs to another run.
    """
    _check(posterior, at)
    state = State(0, [])
    file = None if checkpoint is None else _file(posterior, checkpoint)
    if file is not None and file.path.exists():
        state = _resume(posterior, file)
    with tqdm(total=steps, initial=state.step, desc="EM", disable=hidden(progress)) as bar:
        while state.step < steps and not state.finished:
            found = _step(posterior, at, search or {})
            state = State(state.step + 1, [*state.history, found], found["moved"] <= tolerance)
            if file is not None and posterior.model.ranks.rank == 0:
                _save(posterior, state, file)
            gamma, alpha = (
                ", ".join(f"{v:.3g}" for v in found[name][:4]) for name in ("effective_parameters", "precision")
            )
            bar.set_postfix_str(f"γ {gamma}; α {alpha}; residual {found['residual']:.1e}")
            bar.update()
    posterior.history += state.history


@dataclass(frozen=True)
class State:
    """How far a run has come; hyperparameters, mode and samples are the posterior's."""

    step: int
    history: list[dict[str, Any]]
    finished: bool = False


def _step(posterior: "SampledPosterior", at: str, search: dict[str, Any]) -> dict[str, Any]:
    prior, likelihood = posterior.prior, posterior.likelihood
    mode = None if at == "map" else posterior.linear_mode(**search)
    delta = torch.zeros_like(posterior.lin.theta) if mode is None else mode.delta
    by_sample = posterior.effective_parameters_by_sample().detach()
    gamma, S = by_sample.mean(0), len(by_sample)
    with torch.no_grad():
        distance = posterior.lin.theta + delta - prior.mean
        q = torch.zeros_like(gamma).index_add_(0, prior.precision_index, distance * prior.precision_times(distance))
    precision = prior.precision.detach()
    new = precision_step(precision, gamma, q) if prior.raw_precision.requires_grad else precision
    moved = (new / precision).log().abs().max().item()
    solution = posterior.solution
    found: dict[str, Any] = {
        "precision": precision.tolist(),
        "effective_parameters": gamma.tolist(),
        "standard_error": (by_sample.std(0) / S**0.5).tolist() if S > 1 else None,
        "residual": float("nan") if solution is None else solution.residual,
        "iterations": 0 if solution is None else solution.iterations,
        "mode_steps": 0 if mode is None else mode.certificate.steps,
    }
    if isinstance(likelihood, Gaussian) and likelihood.raw_noise.requires_grad:
        noise = likelihood.noise.detach()
        squares, n = (part.sum() for part in squared_errors(posterior, delta))
        better = _noise(noise, squares, n, gamma.sum())
        found["noise"] = noise.tolist()
        moved = max(moved, (better / noise).log().abs().max().item())
        likelihood.noise = better
    prior.precision = new
    return found | {"moved": moved}


def _noise(noise: Tensor, squares: Tensor, n: Tensor, gamma: Tensor) -> Tensor:
    """Return MacKay's step, or where data determine about as many parameters as they are, or γ̂ errs, EM's: σ² > 0."""
    return noise_step(squares, n, gamma) if gamma < _DETERMINED * n else (squares + noise.mean() * gamma) / n


def _check(posterior: "SampledPosterior", at: str) -> None:
    if at not in ("linear_mode", "map"):
        raise ValueError(f'at must be "linear_mode" or "map", but is {at!r}')
    learnt = {id(p): name for name, p in posterior.named_parameters() if p.requires_grad}
    if not learnt:
        raise ValueError("there is nothing to tune: no hyperparameter of prior and likelihood requires gradients")
    likelihood = posterior.likelihood
    known = {id(getattr(posterior.prior, "raw_precision", None))}
    if isinstance(likelihood, Gaussian) and likelihood.raw_noise.numel() == 1:
        known.add(id(likelihood.raw_noise))
    unknown = [name for key, name in learnt.items() if key not in known]
    if unknown or any(posterior.named_priors()):
        raise ValueError(
            f"sample-based EM tunes precisions and one Gaussian noise without hyperpriors, not {unknown or 'these'}: "
            "fix the others with requires_grad_(False)"
        )


# The state on disk


def _file(posterior: "SampledPosterior", path: str | Path) -> Checkpoint:
    shapes = {name: list(p.shape) for name, p in posterior.named_parameters()}
    identity = {"num_samples": str(posterior.num_samples), "seed": str(posterior.seed), "shapes": json.dumps(shapes)}
    return Checkpoint(Path(path), {"fingerprint": posterior.lin.fingerprint()} | identity)


def _save(posterior: "SampledPosterior", state: State, file: Checkpoint) -> None:
    tensors = {f"parameter.{name}": p.detach() for name, p in posterior.named_parameters()}
    tensors |= {
        name: value
        for name, value in (("mode", posterior._last_mode), ("samples", posterior._last))
        if value is not None
    }
    file.save(
        tensors,
        {"step": str(state.step), "finished": str(int(state.finished)), "history": json.dumps(state.history)},
    )


def _resume(posterior: "SampledPosterior", file: Checkpoint) -> State:
    tensors, told = file.load()
    with torch.no_grad():
        for name, parameter in posterior.named_parameters():
            parameter.copy_(tensors[f"parameter.{name}"])
    like = posterior.lin.theta
    posterior._last_mode = tensors["mode"].to(like) if "mode" in tensors else None
    posterior._last = tensors["samples"].to(like) if "samples" in tensors else None
    return State(int(told["step"]), json.loads(told["history"]), told["finished"] == "1")
