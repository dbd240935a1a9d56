"""Sections of a report: scores, uncertainty in and out of the distribution, examples. They need matplotlib."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ntkgp.linearization.inputs import Input, leaves
from ntkgp.posteriors import Prediction
from ntkgp.report import figures
from ntkgp.report.figures import axes
from ntkgp.report.page import Plate, Section, Table, drawn
from ntkgp.report.scores import Comparison, Score, auc, class_probs

__all__ = ["examples", "regression", "reliability", "scores", "uncertainty"]

_SHOWN = 8  # examples of each kind
_GOOD = {"lower": "lower is better", "higher": "higher is better", "nominal": "should be the level"}


def scores(found: Sequence[Comparison], N: int, plates: Sequence[Plate]) -> Section:
    """Tell scores of N points before and after, with figures below."""
    rows = [(s.name, s.before, s.after, s.difference, _GOOD[s.better]) for s in found]
    text = (
        f"Means over {N} test points ± their standard errors. The difference is of the same points, so its error is "
        "its own. NLL is −log p(y), in nats a point."
    )
    if any(s.name == "RMSE" for s in found):
        text += " Both have the posterior's noise variance."
    elif any(s.name == "ECE" for s in found):
        text += " Both have the likelihood's temperature."
    return Section("Scores", text, Table(rows, ("", "network alone", "posterior", "difference", "")), plates)


def reliability(before: Prediction, after: Prediction, y: Tensor) -> Plate:
    """Draw whether probabilities come true."""
    ax: Any = None
    pairs = (("network alone", before, axes.BEFORE), ("posterior", after, axes.AFTER))
    for label, prediction, color in pairs:
        probs = class_probs(prediction)
        assert probs is not None
        ax = figures.reliability_diagram(probs, y, ax=ax, label=label, color=color)
    caption = (
        "Below the line a prediction is surer than it is right. Points hold equally many examples; bars are ± 1 SE."
    )
    return drawn(ax, "reliability", caption)


def regression(x: Input, y: Tensor, before: Prediction, after: Prediction) -> list[Plate]:
    """Draw predictions with their bands, and coverage."""
    ax = figures.coverage_curve(before, y, label="network alone", color=axes.BEFORE)
    ax = figures.coverage_curve(after, y, ax=ax, label="posterior")
    bands = figures.prediction_bands(leaves(x)[0], y, after)
    return [
        drawn(bands, "bands", "Targets should lie within two standard deviations of y about 19 times of 20."),
        drawn(ax, "coverage", "Below the line intervals are too narrow, above it too wide; bars are ± 1 SE."),
    ]


def uncertainty(
    here: tuple[Prediction, Prediction], elsewhere: tuple[Prediction, Prediction] | None
) -> tuple[Section, dict[str, Score]]:
    """Compare uncertainties inside and, if there are data, outside: each before and after."""
    inside, outside = _uncertainties(*here), None
    detection: dict[str, Score] = {}
    if elsewhere is not None:
        outside = _uncertainties(*elsewhere)
        detection = {name: auc(inside[name], outside[name]) for name in inside}
    plates = []
    for i, (name, values) in enumerate(inside.items()):
        if name.startswith("network"):
            continue
        other = None if outside is None else outside[name]
        ax = figures.uncertainty_histogram(values, other, name)
        plates.append(drawn(ax, f"histogram{i}", f"{name[0].upper()}{name[1:]} of each point."))
    table, text = None, "No data from elsewhere were given."
    if outside is not None and elsewhere is not None:
        curves: Any = None
        colors = {"network's entropy": axes.BEFORE, "epistemic variance": axes.THIRD}
        for name in inside:
            curves = figures.detection_curve(inside[name], outside[name], curves, name, colors.get(name, axes.AFTER))
        caption = "The further up and left, the better other data are told from test data."
        plates.append(drawn(curves, "detection", caption))
        table = Table(list(detection.items()), ("told apart by", "AUC"))
        text = (
            f"{len(elsewhere[1].mean)} points from elsewhere should be less certain: an AUC of 1, where 0.5 is chance."
        )
    return Section("Uncertainty", text, table, plates), detection


def _uncertainties(before: Prediction, after: Prediction) -> dict[str, Tensor]:  # (N,) each
    """Return what a point may be uncertain by; the network alone has its entropy, if y is discrete."""
    found = {}
    if after._likelihood.discrete:
        found["network's entropy"] = before.entropy
        found["entropy"] = after.entropy
    return found | {"epistemic variance": after.epistemic.sum(1)}


def examples(x: Input, y: Tensor, prediction: Prediction) -> list[Section]:
    """Show the least and the most certain images, if points are images of one class each."""
    probs, images = class_probs(prediction), leaves(x)[0]
    if probs is None or len(leaves(x)) > 1 or images.ndim != 4 or images.shape[1] not in (1, 3):
        return []
    order, guess, labels = prediction.entropy.argsort().cpu(), probs.argmax(1), y.reshape(-1).cpu()

    def plate(index: Tensor, name: str, caption: str) -> Plate:
        titles = [
            f"{guess[i]}: {probs[i].max():.0%}" + (f" ({labels[i]})" if guess[i] != labels[i] else "") for i in index
        ]
        return drawn(figures.example_images(images[index], titles), name, caption)

    caption = "Least certain: class and its probability (the true one if another)."
    plates = [plate(order.flip(0)[:_SHOWN], "uncertain", caption), plate(order[:_SHOWN], "certain", "Most certain.")]
    return [Section("Examples", plates=plates)]
