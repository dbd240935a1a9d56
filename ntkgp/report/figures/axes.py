"""Where figures are drawn, and in which colours: those that are legible on white and on black."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["AFTER", "BEFORE", "GUIDE", "THIRD", "axes_or_new"]

BEFORE, AFTER, THIRD = "#d9822b", "#3f8fd2", "#3fa37a"  # the network alone, the posterior, one thing more
GUIDE = "#8a8a8a"  # lines to compare with
_SIZE = 4.8, 3.6  # inches


def axes_or_new(ax: Axes | None, size: tuple[float, float] = _SIZE) -> Axes:
    """Return the axes, or new ones in a figure of their own, without a box around them."""
    ax = Figure(figsize=size, layout="constrained").add_subplot() if ax is None else ax
    ax.spines[["top", "right"]].set_visible(False)
    return ax
