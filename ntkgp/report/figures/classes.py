"""Classes: whether probabilities come true, and which examples are the most and the least certain."""

import math
from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from torch import Tensor

from ntkgp.report.figures.axes import AFTER, GUIDE, axes_or_new
from ntkgp.report.metrics import reliability

__all__ = ["example_images", "reliability_diagram"]


def reliability_diagram(
    probs: Tensor, y: Tensor, bins: int = 10, ax: Axes | None = None, label: str | None = None, color: str = AFTER
) -> Axes:  # (N, K), (N,)
    r"""Draw how often the predicted class is right against how probable it was said to be.

    Bins hold equally many points; a bar is the standard error :math:`\sqrt{h(1-h)/n}` of the share h of n points, or,
    where all or none are right, of (n h + ½)/(n + 1) in its place: no share of few points is certain.

    Args:
        probs: class probabilities.
        y: classes.
        bins: how many, at most a fifth of the points.
        ax: where to draw.
        label: for the legend.
        color: of the points.
    """
    ax = axes_or_new(ax)
    bins = max(1, min(bins, len(y) // 5))
    mean, hits, share = reliability(probs, y, bins, adaptive=True)
    n = share * len(y)
    safe = torch.where((hits > 0) & (hits < 1), hits, (n * hits + 0.5) / (n + 1))
    error = (safe * (1 - safe) / n).sqrt()
    if not ax.lines:
        ax.plot([0, 1], [0, 1], color=GUIDE, linewidth=0.9, label="calibrated")
    lower, upper = torch.minimum(error, hits), torch.minimum(error, 1 - hits)
    ax.errorbar(
        mean.numpy(), hits.numpy(), torch.stack([lower, upper]).numpy(), fmt="o", color=color, markersize=4, label=label
    )
    ax.set(xlabel="probability of the predicted class", ylabel="how often it is right", title="reliability")
    ax.set(xlim=(1 / probs.shape[1] - 0.02, 1.02), ylim=(-0.02, 1.04))  # no top probability is below 1/K
    ax.legend(frameon=False, fontsize="small")
    return ax


def example_images(x: Tensor, titles: Sequence[str], columns: int = 4, ax: Axes | None = None) -> Axes:
    """Draw images side by side, each with a line below it.

    Args:
        x: (n, 1, H, W) or (n, 3, H, W); each image is scaled to its own smallest and largest value.
        titles: what to write below each.
        columns: in a row.
        ax: where to draw.

    Raises:
        ValueError: if ``x`` does not hold images, or there is not a title for each.
    """
    if x.ndim != 4 or x.shape[1] not in (1, 3):
        raise ValueError(f"x must hold images of shape (n, 1, H, W) or (n, 3, H, W), but has {tuple(x.shape)}")
    if len(titles) != len(x):
        raise ValueError(f"titles must be {len(x)}, one for each image, but are {len(titles)}")
    n, _, H, W = x.shape
    rows, columns = math.ceil(n / columns), min(columns, n)
    gap, margin = 0.22 * H, 0.1 * W  # below an image, for the line, and beside it
    ax = axes_or_new(ax, (1.2 * columns, 1.2 * rows * (H + gap) / (W + margin)))
    for i, image in enumerate(x.detach().double().cpu()):
        low, high = image.min(), image.max()
        scaled = ((image - low) / (high - low if high > low else 1)).movedim(0, -1).numpy()
        top, left = (i // columns) * (H + gap), (i % columns) * (W + margin)
        place = (left, left + W, top + H, top)
        ax.imshow(scaled.squeeze(-1) if x.shape[1] == 1 else scaled, cmap="gray", vmin=0, vmax=1, extent=place)
        ax.text(left + W / 2, top + H + gap / 2, titles[i], ha="center", va="center", fontsize="small")
    ax.set(xticks=[], yticks=[], xlim=(0, columns * (W + margin)), ylim=(rows * (H + gap), 0))
    ax.spines[:].set_visible(False)
    return ax
