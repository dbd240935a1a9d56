"""Scores with their standard errors: of a prediction, and of the difference of two at the same points."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ntkgp.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from ntkgp.posteriors import Prediction
from ntkgp.report.metrics import expected_calibration_error, ood_auc

__all__ = ["Comparison", "Score", "auc", "class_probs", "compared", "is_numeric", "mean_of"]

_RESAMPLES = 200
LEVEL = 0.9  # of the interval whose coverage is told


@dataclass(frozen=True)
class Score:
    """An estimate from N points, and its standard error over draws of these points."""

    value: float
    error: float

    def __str__(self) -> str:
        if not self.error > 0:
            return f"{self.value:.3g} ± {self.error:.1g}"
        digits = max(0, 1 - int(torch.tensor(self.error, dtype=torch.float64).log10().floor()))  # two of the error's
        return f"{self.value:.{digits}f} ± {self.error:.{digits}f}"


@dataclass(frozen=True)
class Comparison:
    """A score before and after, and their difference, whose error knows that the points are the same."""

    name: str
    better: str  # "lower", "higher" or "nominal"
    before: Score
    after: Score
    difference: Score


def compared(before: Prediction, after: Prediction, y: Tensor) -> list[Comparison]:
    """Compare two predictions of the same points by all scores that their likelihood has.

    Errors of means are standard deviations over √N; that of the calibration error, which is no mean, is from 200
    resamples of the points.
    """
    found = [_means("NLL", "lower", -before.log_prob(y), -after.log_prob(y))]
    if (p := class_probs(before)) is not None and (q := class_probs(after)) is not None:
        labels = y.reshape(-1).long().cpu()
        found += [
            _means("accuracy", "higher", *((r.argmax(1) == labels).double() for r in (p, q))),
            _resampled("ECE", "lower", lambda r, i: expected_calibration_error(r[i], labels[i]), p, q),
            _means("Brier score", "lower", *(_brier(r, labels) for r in (p, q))),
        ]
    elif is_numeric(after):
        targets = y.reshape(after.mean.shape)
        found.append(_root(_means("RMSE", "lower", *((targets - r.mean).square().mean(1) for r in (before, after)))))
        found.append(_means(f"{LEVEL:.0%} interval holds", "nominal", *(_inside(r, targets) for r in (before, after))))
    return found


def auc(inside: Tensor, outside: Tensor) -> Score:  # (N,), (M,)
    r"""Return the area under the ROC curve and its standard error (DeLong et al. 1988).

    With :math:`v_i` the share of outside scores above inside score i, and :math:`w_j` that of inside scores below
    outside score j, ties counted half, the variance is var(v)/N + var(w)/M.
    """
    a, b = inside.detach().double().cpu(), outside.detach().double().cpu()
    v = 1 - _below(b.sort().values, a)
    w = _below(a.sort().values, b)
    variance = sum(part.var(correction=1) / len(part) for part in (v, w) if len(part) > 1)
    return Score(ood_auc(a, b), float(variance) ** 0.5)


def class_probs(prediction: Prediction) -> Tensor | None:  # (N, K)
    """Return the probabilities of K classes, two for a single label; None if there is not one class a point."""
    likelihood = prediction._likelihood
    if not likelihood.discrete:
        return None
    p = prediction.probs.detach().double().cpu()
    if isinstance(likelihood, Categorical):
        return p if likelihood.site_size(p.shape[1]) == p.shape[1] else None
    return torch.cat([1 - p, p], 1) if p.shape[1] == 1 else None


def is_numeric(prediction: Prediction) -> bool:
    """Whether y is Gaussian, so that intervals are of the mean ± some standard deviations."""
    return isinstance(prediction._likelihood, Gaussian | HeteroscedasticGaussian)


def _means(name: str, better: str, before: Tensor, after: Tensor) -> Comparison:  # twice (N,)
    before, after = (part.detach().double().cpu() for part in (before, after))
    return Comparison(name, better, *(mean_of(part) for part in (before, after, after - before)))


def mean_of(values: Tensor) -> Score:  # (N,)
    """Return the mean of independent numbers and its standard error."""
    error = values.std().item() / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return Score(values.mean().item(), error)


def _root(squares: Comparison) -> Comparison:
    """Return the comparison of roots of means: by the delta method an error is halved and divided by the root."""
    before, after = (Score(s.value**0.5, s.error / (2 * s.value**0.5)) for s in (squares.before, squares.after))
    middle = before.value + after.value
    difference = Score(after.value - before.value, squares.difference.error / middle)
    return Comparison(squares.name, squares.better, before, after, difference)


def _resampled(
    name: str, better: str, score: Callable[[Tensor, Tensor], float], before: Tensor, after: Tensor
) -> Comparison:
    N, generator = len(before), torch.Generator().manual_seed(0)
    everything = torch.arange(N)
    draws = []
    for _ in range(_RESAMPLES):
        index = torch.randint(N, (N,), generator=generator)
        draws.append((score(before, index), score(after, index)))
    a, b = torch.tensor(draws, dtype=torch.float64).unbind(1)
    here, there = score(before, everything), score(after, everything)
    errors = [part.std().item() for part in (a, b, b - a)]
    return Comparison(name, better, *(Score(v, e) for v, e in zip((here, there, there - here), errors, strict=True)))


def _brier(probs: Tensor, y: Tensor) -> Tensor:  # (N, K), (N,) -> (N,)
    return (probs - torch.nn.functional.one_hot(y, probs.shape[1])).square().sum(1)


def _inside(prediction: Prediction, y: Tensor) -> Tensor:  # (N, C) -> (N,)
    z = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor((1 + LEVEL) / 2)).item()
    return ((y - prediction.mean).abs() <= z * prediction.variance.sqrt()).double().mean(1)


def _below(ordered: Tensor, values: Tensor) -> Tensor:  # (N,), (M,) -> (M,)
    """Return the share of ``ordered`` below each value, ties counted half."""
    lower, upper = torch.searchsorted(ordered, values), torch.searchsorted(ordered, values, right=True)
    return (lower + upper).double() / (2 * len(ordered))
