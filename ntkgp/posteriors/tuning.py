"""Hyperparameters by evidence, or by a score on validation data. The network is not differentiated again."""

import warnings
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ntkgp.evidence import maximise
from ntkgp.posteriors.data import as_source, gather

if TYPE_CHECKING:
    from ntkgp.posteriors.base import Posterior

__all__ = ["tune"]

P = TypeVar("P", bound="Posterior")
_FAR = 1.0  # nats a target


def tune(
    posterior: P,
    at: str = "linear_mode",
    validation: Any = None,
    grid: Tensor | None = None,
    steps: int = 50,
    curvature_at: str = "map",
    progress: bool | None = None,
) -> P:
    """Maximise the evidence over all hyperparameters that require gradients, or a validation score over a grid.

    By evidence: quasi-Newton steps over the raw parameters, their logarithms. On validation data: all precisions are
    multiplied by each value of ``grid``, and the one with the best mean log predictive density stays. Every step
    is a line of ``posterior.history``. If anything fails, the hyperparameters are as they were.

    Args:
        posterior: whose prior and likelihood to tune, in place.
        at: where the evidence is evaluated, "linear_mode" or "map".
        validation: (X, y), a Dataset or a DataLoader.
        grid: factors for the precisions, 10⁻⁴ to 10⁴ by default.
        steps: at most so many steps.
        curvature_at: where Λ is evaluated, "map" or "linear_mode".
        progress: whether to show a bar; by default in a terminal.

    Returns:
        The same posterior.

    Raises:
        ValueError: if there is nothing to tune.
    """
    before = [(p, p.detach().clone()) for p in posterior.parameters()]
    try:
        if validation is None:
            _by_evidence(posterior, at, curvature_at, steps, progress)
        else:
            _on_validation(posterior, validation, grid, progress)
    except BaseException:
        with torch.no_grad():
            for parameter, value in before:
                parameter.copy_(value)
        raise
    return posterior


def _by_evidence(posterior: "Posterior", at: str, curvature_at: str, steps: int, progress: bool | None) -> None:
    hyperparameters = [p for p in posterior.parameters() if p.requires_grad]
    if not hyperparameters:
        raise ValueError("there is nothing to tune: no hyperparameter of prior and likelihood requires gradients")
    tolerance = 1e-6 if hyperparameters[0].dtype == torch.float64 else 1e-4

    def objective() -> Tensor:
        return posterior.log_evidence(at, curvature_at) + _log_hyperprior(posterior)

    with tqdm(total=steps, desc="tune", disable=_hidden(progress)) as bar:
        for step in maximise(objective, hyperparameters, steps, tolerance):
            found = {"log_evidence": step.value, "gradient_norm": step.gradient_norm}
            posterior.history.append(found | _settings(posterior))
            bar.set_postfix(log_evidence=f"{step.value:.4g}")
            bar.update()
    if at == "linear_mode" and posterior.shift is None:
        _warn_if_far(posterior)


def _warn_if_far(posterior: "Posterior") -> None:
    """Say so if the tuned linear model explains the data far better than the network, where the mean still is."""
    with torch.no_grad():
        delta = posterior.linear_mode().delta
        total = posterior._log_likelihood(delta) - posterior._log_likelihood(torch.zeros_like(delta))
        gain = total.item() / sum(chunk.data.y.numel() for chunk in posterior.model)
    if gain > _FAR:
        warnings.warn(
            f"the mode of the linear model gains {gain:.1f} nats a target over the network itself: the network is not "
            "at its mode, and hyperparameters (noise above all) were tuned for the linear model. Train on, use "
            'post.refine(), or tune(at="map")',
            stacklevel=5,
        )


def _log_hyperprior(posterior: "Posterior") -> Tensor | float:
    total: Tensor | float = 0.0
    for _, module, prior, closure, _ in posterior.named_priors():
        total = total + prior.log_prob(closure(module)).sum()
    return total


def _on_validation(posterior: "Posterior", validation: Any, grid: Tensor | None, progress: bool | None) -> None:
    prior = posterior.prior
    if not hasattr(prior, "precision"):
        raise ValueError(f"a grid needs a prior with precisions, but {type(prior).__name__} has none: tune by evidence")
    source = as_source(validation, posterior.lin, posterior.likelihood)
    data = gather(source, posterior.lin, posterior.likelihood)
    grid = torch.logspace(-4, 4, 17) if grid is None else torch.as_tensor(grid)
    start = prior.precision.detach().clone()
    scores = []
    for factor in tqdm(grid.tolist(), desc="tune", disable=_hidden(progress)):
        prior.precision = start * factor
        scores.append(posterior.predict(data.x).log_prob(data.y).mean().item())
        posterior.history.append({"validation_log_prob": scores[-1]} | _settings(posterior))
    if all(score != score for score in scores):
        raise RuntimeError("the validation score is not a number for any precision of the grid")
    best = max(range(len(scores)), key=lambda i: scores[i] if scores[i] == scores[i] else -float("inf"))
    prior.precision = start * grid[best].item()


def _settings(posterior: "Posterior") -> dict[str, Any]:
    found = {}
    for name in ("precision", "noise"):
        for owner in (posterior.prior, posterior.likelihood):
            value = getattr(owner, name, None)
            if isinstance(value, Tensor):
                found[name] = value.detach().tolist()
    return found


def _hidden(progress: bool | None) -> bool | None:
    """Translate for tqdm, whose None means: in a terminal only."""
    return None if progress is None else not progress
