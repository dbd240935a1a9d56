"""Uncertainty in and out of the distribution: histograms, and how well it tells one from the other."""

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from ntkgp.report.figures.axes import AFTER, BEFORE, GUIDE, axes_or_new
from ntkgp.report.scores import auc

__all__ = ["detection_curve", "uncertainty_histogram"]

_BINS = 30


def uncertainty_histogram(
    inside: Tensor, outside: Tensor | None = None, xlabel: str = "entropy", ax: Axes | None = None
) -> Axes:  # (N,), (M,)
    """Draw how an uncertainty is distributed on test data, and on other data if there are.

    Args:
        inside: of test points.
        outside: of points from elsewhere.
        xlabel: what it is.
        ax: where to draw.
    """
    ax = axes_or_new(ax)
    values = [part.detach().double().cpu().numpy() for part in (inside, outside) if part is not None]
    together = np.concatenate(values)
    edges = np.histogram_bin_edges(together, _BINS if np.ptp(together) > 0 else 1).tolist()
    for part, label, color in zip(values, ("test data", "other data"), (AFTER, BEFORE), strict=False):
        weights = np.full(len(part), 1 / len(part))
        ax.hist(part, edges, weights=weights, color=color, alpha=0.55, label=f"{label} ({len(part)})")
    ax.set(xlabel=xlabel, ylabel="share of points")
    ax.legend(frameon=False, fontsize="small")
    return ax


def detection_curve(
    inside: Tensor, outside: Tensor, ax: Axes | None = None, label: str = "", color: str = AFTER
) -> Axes:  # (N,), (M,)
    """Draw the share of outside points above each threshold against that of inside points (ROC), with its AUC.

    Args:
        inside: uncertainties of test points.
        outside: uncertainties of points from elsewhere.
        ax: where to draw.
        label: what the uncertainty is.
        color: of the curve.
    """
    ax = axes_or_new(ax)
    a, b = (part.detach().double().cpu().sort().values for part in (inside, outside))
    thresholds = torch.cat([a, b]).unique().flip(0)
    above = lambda part: 1 - torch.searchsorted(part, thresholds) / len(part)  # noqa: E731
    zero = torch.zeros(1)
    if not ax.lines:
        ax.plot([0, 1], [0, 1], color=GUIDE, linewidth=0.9)
    found = auc(inside, outside)
    ax.plot(torch.cat([zero, above(a)]), torch.cat([zero, above(b)]), color=color, label=f"{label}: AUC {found}")
    ax.set(xlabel="share of test data above the threshold", ylabel="share of other data above it", title="detection")
    ax.legend(frameon=False, fontsize="small", loc="lower right")
    return ax
