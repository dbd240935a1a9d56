"""Regression: predictions with their bands, and whether intervals hold what they promise."""

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from ntkgp.posteriors import Prediction
from ntkgp.report.figures.axes import AFTER, GUIDE, axes_or_new
from ntkgp.report.metrics import interval_coverage

__all__ = ["coverage_curve", "prediction_bands"]

LEVELS = tuple(np.linspace(0.05, 0.95, 19).round(2).tolist())
_SHOWN = 200  # points with error bars, at most


def prediction_bands(
    x: Tensor, y: Tensor, prediction: Prediction, output: int = 0, ax: Axes | None = None
) -> Axes:  # (N, ...), (N, C)
    """Draw one output with bands of two standard deviations: of f, and of y.

    Over the input if that is a single number, else against the targets, where points on the diagonal are right.

    Args:
        x: the inputs.
        y: the targets.
        prediction: at these inputs.
        output: which output.
        ax: where to draw.
    """
    ax = axes_or_new(ax)
    mean, f, total = (
        part.detach().double().cpu()[:, output]
        for part in (prediction.mean, 2 * prediction.epistemic.sqrt(), 2 * prediction.variance.sqrt())
    )
    targets = y.detach().double().cpu().reshape(len(y), -1)[:, output]
    if x[0].numel() == 1:
        t = x.detach().double().cpu().flatten()
        order = t.argsort()
        at, m, inner, outer = (part[order].numpy() for part in (t, mean, f, total))
        ax.fill_between(at, m - outer, m + outer, color=AFTER, alpha=0.2, linewidth=0, label="± 2 std of y")
        ax.fill_between(at, m - inner, m + inner, color=AFTER, alpha=0.4, linewidth=0, label="± 2 std of f")
        ax.plot(at, m, color=AFTER, label="mean")
        ax.plot(at, targets[order].numpy(), ".", color=GUIDE, markersize=4, label="test data")
        ax.set(xlabel="input", ylabel="output", title="predictions")
    else:
        some = torch.arange(len(y))[:: max(1, len(y) // _SHOWN)]
        ends = [targets.min().item(), targets.max().item()]
        ax.plot(ends, ends, color=GUIDE, linewidth=0.9)
        at, m, outer = (part[some].numpy() for part in (targets, mean, total))
        ax.errorbar(at, m, outer, fmt="o", color=AFTER, markersize=3, elinewidth=0.6, label="mean ± 2 std of y")
        ax.set(xlabel="target", ylabel="prediction", title="predictions")
    ax.legend(frameon=False, fontsize="small")
    return ax


def coverage_curve(
    prediction: Prediction, y: Tensor, ax: Axes | None = None, label: str | None = None, color: str = AFTER
) -> Axes:
    r"""Draw how many targets lie in central intervals, against how many should; bars are √(c(1 − c)/n).

    Args:
        prediction: with mean and variance.
        y: the targets.
        ax: where to draw.
        label: for the legend.
        color: of the points.
    """
    ax = axes_or_new(ax)
    held = np.array([interval_coverage(prediction, y, level) for level in LEVELS])
    if not ax.lines:
        ax.plot([0, 1], [0, 1], color=GUIDE, linewidth=0.9, label="calibrated")
    error = np.sqrt(held * (1 - held) / y.numel())
    ax.errorbar(LEVELS, held, error, fmt="o-", color=color, markersize=3, linewidth=0.9, label=label)
    ax.set(xlabel="level of the interval", ylabel="share of targets inside", title="coverage")
    ax.set(xlim=(0, 1), ylim=(0, 1.02))
    ax.legend(frameon=False, fontsize="small")
    return ax
