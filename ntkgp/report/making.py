"""How a posterior was made: method, hyperparameters, tuning and certificates, as sections of a page with figures."""

from typing import Any

import torch

from ntkgp.posteriors import Posterior, SampledPosterior, VariationalPosterior
from ntkgp.posteriors.data import Data
from ntkgp.posteriors.tuning import settings
from ntkgp.report import figures
from ntkgp.report.page import Section, Table, drawn

__all__ = ["group_values", "made"]

_GROUPS = 40  # bars, at most
_NAMES = {"precision": "prior precision", "noise": "noise variance", "temperature": "temperature"}


def made(post: Posterior, seconds: float | None) -> list[Section]:
    """Return what is told of a posterior itself.

    Args:
        post: the posterior.
        seconds: that fitting took.
    """
    plates = []
    precisions = group_values(post, "precision")
    if precisions and len(precisions) > 1:
        ax = figures.group_points(precisions, "prior precision")
        plates.append(drawn(ax, "precisions", "The larger, the closer to their prior mean the weights must stay."))
    gamma, sizes = group_values(post, "effective_parameters"), group_values(post, "sizes")
    if gamma:
        ax = figures.group_points(gamma, "effective parameters", of=sizes)
        plates.append(drawn(ax, "effective", "How many parameters of each group the data determine."))
    if any("log_evidence" in step or "bound" in step or "validation_log_prob" in step for step in post.history):
        ax = figures.evidence_curve(post.history)
        plates.append(drawn(ax, "evidence", "A curve that still climbs asks for more steps."))
    return [Section("Prior and evidence", plates=plates)] * bool(plates) + [_method(post, gamma, seconds)]


def group_values(post: Posterior, what: str) -> dict[str, float] | None:
    """Return a number for each group of the prior: "precision", "effective_parameters" or "sizes"; None if unknown."""
    groups = getattr(post.prior, "groups", None)
    if groups is None or not 1 <= len(groups) <= _GROUPS:
        return None
    if what == "sizes":
        size = dict(zip(post.lin.layout.names, post.lin.layout.sizes, strict=True))
        return {name: float(sum(size[p] for p in names)) for name, names in groups.items()}
    values = post.prior.precision if what == "precision" else _effective(post)
    if values is None or values.numel() != len(groups):
        return None
    return dict(zip(groups, values.detach().double().flatten().tolist(), strict=True))


def _effective(post: Posterior) -> torch.Tensor | None:  # γ, (G,)
    logged = [step["effective_parameters"] for step in post.history if "effective_parameters" in step]
    if logged:
        return torch.tensor(logged[-1])
    if isinstance(post, SampledPosterior | VariationalPosterior):  # they have no log |B| in closed form
        return None
    return post.effective_parameters()


def _method(post: Posterior, gamma: dict[str, float] | None, seconds: float | None) -> Section:
    found: dict[str, Any] = {"method": post.method} | ({"why": post.reason} if post.reason else {})
    if isinstance(post.model.source, Data):
        found["training points"] = len(post.model.source)
    found |= {"weights": post.lin.num_params, "outputs": post.lin.num_outputs, "prior": type(post.prior).__name__}
    found |= {"likelihood": type(post.likelihood).__name__, "precision of numbers": str(post.lin.dtype)[6:]}
    for name, value in settings(post).items():
        values = torch.tensor(value).flatten()
        several = f"{values.min():.4g} to {values.max():.4g} ({len(values)})"
        found[_NAMES[name]] = f"{values.item():.4g}" if len(values) == 1 else several
    if gamma:
        found["effective parameters"] = f"{sum(gamma.values()):.1f} of {post.lin.num_params}"
    for key, name in (("log_evidence", "log evidence, last step"), ("bound", "bound, last step")):
        if post.history and key in post.history[-1]:
            found[name] = f"{post.history[-1][key]:.2f}"
    if post.history:
        found["steps of tuning"] = len(post.history)
    if seconds is not None:
        found["fitting and tuning took"] = f"{seconds:.1f} s"
    found |= _certificates(post)
    return Section("How it was made", table=Table.of(found))


def _certificates(post: Posterior) -> dict[str, str]:
    found = {}
    if (c := post.certificate) is not None:
        state = "converged" if c.converged else "not converged"
        found["refined mean"] = (
            f"{state} after {c.steps} steps; gradient {c.gradient_norm:.2g} prior standard deviations, "
            f"could gain {c.decrement:.2g} nats"
        )
    solution = getattr(post, "solution", None)
    if solution is not None:
        found["samples"] = f"relative residual {solution.residual:.2g} after {solution.iterations} iterations"
    return found
