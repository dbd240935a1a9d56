"""What tuning found: the evidence step by step, and a number for each group of weights."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ntkgp.report.figures.axes import AFTER, GUIDE, axes_or_new

__all__ = ["evidence_curve", "group_points"]

CLIMBED = {  # what a step of tuning may log, in this order, and how it is called on an axis
    "log_evidence": "log evidence",
    "bound": "bound on the log evidence",
    "validation_log_prob": "mean log p(y) on validation data",
    "effective_parameters": "effective parameters γ",
}


def evidence_curve(history: Sequence[Mapping[str, Any]], ax: Axes | None = None) -> Axes:
    """Draw what tuning climbed, step by step.

    Args:
        history: ``posterior.history``.
        ax: where to draw.

    Raises:
        ValueError: if nothing was tuned.
    """
    logged = [key for key in CLIMBED if any(key in step for step in history)]
    if not logged:
        raise ValueError("history must hold steps of tuning, but holds none")
    values = [step[logged[0]] for step in history if logged[0] in step]
    values = [sum(value) if isinstance(value, list) else value for value in values]
    ax = axes_or_new(ax)
    ax.plot(values, ".-", color=AFTER, linewidth=0.9)
    ax.set(xlabel="step of tuning", ylabel=CLIMBED[logged[0]], title="tuning")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ax


def group_points(
    values: Mapping[str, float], xlabel: str, ax: Axes | None = None, of: Mapping[str, float] | None = None
) -> Axes:
    """Draw a point for each group of weights on a logarithmic axis.

    Args:
        values: by group, positive.
        xlabel: what they are.
        ax: where to draw.
        of: what each is a part of, drawn beside it.
    """
    ax = axes_or_new(ax, (4.8, 1.2 + 0.3 * len(values)))
    names = list(values)
    if of is not None:
        ax.plot(
            [of[name] for name in names],
            names,
            "|",
            color=GUIDE,
            markersize=12,
            markeredgewidth=2,
            label="all parameters",
        )
    ax.plot([values[name] for name in names], names, "o", color=AFTER, label=xlabel)
    ax.set_xscale("log")
    ax.set(xlabel=xlabel, ylim=(len(names) - 0.5, -0.5))  # as the layers come
    ax.grid(axis="y", color=GUIDE, alpha=0.4, linewidth=0.6)
    if of is not None:
        ax.legend(frameon=False, fontsize="small", loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)
    return ax
