"""What a posterior is worth on test data, as one page: scores before and after, figures, and how it was made."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ntkgp.linearization.inputs import Input, batch_size, leaves
from ntkgp.posteriors import Posterior, Prediction
from ntkgp.report.making import made
from ntkgp.report.page import Plate, Section, Table, page, svg
from ntkgp.report.scores import Comparison, Score, auc, class_probs, compared, is_numeric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Report", "report"]

_SHOWN = 8  # examples of each kind
_GOOD = {"lower": "lower is better", "higher": "higher is better", "nominal": "should be the level"}


@dataclass(frozen=True)
class Report:
    """A page, and the numbers in it."""

    html: str
    scores: dict[str, Comparison]
    detection: dict[str, Score]  # AUC by kind of uncertainty, if other data were given

    def save(self, path: str | Path) -> None:
        """Write the page."""
        Path(path).write_text(self.html, encoding="utf-8")


def report(
    post: Posterior,
    test: tuple[Input, Tensor],
    ood: Input | None = None,
    *,
    title: str = "Error bars of a network",
    seconds: float | None = None,
) -> Report:
    """Return a page on what the posterior is worth: it needs matplotlib, and no network to be read.

    Args:
        post: the posterior.
        test: (X, y) that it was not fitted to.
        ood: inputs from elsewhere, which it should be uncertain about.
        title: of the page.
        seconds: that fitting took, to be told.

    Raises:
        ImportError: if there is no matplotlib.
        ValueError: if data and posterior do not fit together.
    """
    import ntkgp.report.figures as draw  # matplotlib, where it is used

    with _default_style():
        x, y = test
        before, after = post.predict(x, predictive="map"), post.predict(x)
        scores = compared(before, after, y)
        sections = [_scores_section(scores, len(y))]
        plates: list[Plate] = []
        if (probs := class_probs(after)) is not None:
            plates = [_reliability(draw, before, after, y)]
        elif is_numeric(after):
            plates = _regression(draw, x, y, before, after)
        sections[0] = Section(sections[0].heading, sections[0].text, sections[0].table, plates)
        section, detection = _uncertainty(draw, post, before, after, ood)
        sections.append(section)
        if probs is not None and _are_images(x):
            sections.append(_examples(draw, leaves(x)[0], y, probs, after.entropy))
        sections += made(draw, post, seconds)
    C = post.lin.num_outputs
    text = (
        f"A network with {post.lin.num_params} Bayesian weights and {C} output{'s' * (C > 1)}, linearised at its "
        f"weights: alone, and with the posterior over them. {len(y)} test points."
    )
    return Report(page(title, text, sections), {s.name: s for s in scores}, detection)


def _default_style() -> Any:
    import matplotlib.style

    return matplotlib.style.context("default")


def _plate(ax: "Axes", name: str, caption: str) -> Plate:
    return Plate(svg(ax.figure, name), caption)  # type: ignore[arg-type]


def _scores_section(scores: Sequence[Comparison], N: int) -> Section:
    rows = [(s.name, s.before, s.after, s.difference, _GOOD[s.better]) for s in scores]
    text = (
        f"Means over {N} test points ± their standard errors. The difference is of the same points, so its error is "
        "its own. NLL is −log p(y), in nats a point."
    )
    if any(s.name == "RMSE" for s in scores):
        text += " Both have the posterior's noise variance."
    return Section("Scores", text, Table(rows, ("", "network alone", "posterior", "difference", "")))


def _reliability(draw: Any, before: Prediction, after: Prediction, y: Tensor) -> Plate:
    ax: Any = None
    pairs = (("network alone", before, draw.axes.BEFORE), ("posterior", after, draw.axes.AFTER))
    for label, prediction, color in pairs:
        probs = class_probs(prediction)
        assert probs is not None
        ax = draw.reliability_diagram(probs, y, ax=ax, label=label, color=color)
    caption = (
        "Below the line a prediction is surer than it is right. Points hold equally many examples; bars are ± 1 SE."
    )
    return _plate(ax, "reliability", caption)


def _regression(draw: Any, x: Input, y: Tensor, before: Prediction, after: Prediction) -> list[Plate]:
    ax = draw.coverage_curve(before, y, label="network alone", color=draw.axes.BEFORE)
    ax = draw.coverage_curve(after, y, ax=ax, label="posterior")
    bands = draw.prediction_bands(leaves(x)[0], y, after)
    return [
        _plate(bands, "bands", "Targets should lie within two standard deviations of y about 19 times of 20."),
        _plate(ax, "coverage", "Below the line intervals are too narrow, above it too wide; bars are ± 1 SE."),
    ]


def _uncertainty(
    draw: Any, post: Posterior, before: Prediction, after: Prediction, ood: Input | None
) -> tuple[Section, dict[str, Score]]:
    """Compare uncertainties inside and, if there are data, outside."""
    inside, outside = _uncertainties(before, after), None
    detection: dict[str, Score] = {}
    if ood is not None:
        outside = _uncertainties(post.predict(ood, predictive="map"), post.predict(ood))
        detection = {name: auc(inside[name], outside[name]) for name in inside}
    plates = []
    for i, (name, values) in enumerate(inside.items()):
        if name.startswith("network"):
            continue
        other = None if outside is None else outside[name]
        ax = draw.uncertainty_histogram(values, other, name)
        plates.append(_plate(ax, f"histogram{i}", f"{name[0].upper()}{name[1:]} of each point."))
    table, text = None, "No data from elsewhere were given."
    if outside is not None and ood is not None:
        ax, colors = None, {"network's entropy": draw.axes.BEFORE, "epistemic variance": draw.axes.THIRD}
        for name in inside:
            ax = draw.detection_curve(inside[name], outside[name], ax, name, colors.get(name, draw.axes.AFTER))
        caption = "The further up and left, the better other data are told from test data."
        plates.append(_plate(ax, "detection", caption))
        table = Table(list(detection.items()), ("told apart by", "AUC"))
        text = f"{batch_size(ood)} points from elsewhere should be less certain: an AUC of 1, where 0.5 is chance."
    return Section("Uncertainty", text, table, plates), detection


def _uncertainties(before: Prediction, after: Prediction) -> dict[str, Tensor]:  # (N,) each
    """Return what a point may be uncertain by; the network alone has its entropy, if y is discrete."""
    found = {}
    if after._likelihood.discrete:
        found["network's entropy"] = before.entropy
        found["entropy"] = after.entropy
    return found | {"epistemic variance": after.epistemic.sum(1)}


def _are_images(x: Input) -> bool:
    first = leaves(x)[0]
    return len(leaves(x)) == 1 and first.ndim == 4 and first.shape[1] in (1, 3)


def _examples(draw: Any, x: Tensor, y: Tensor, probs: Tensor, entropy: Tensor) -> Section:
    order, guess, labels = entropy.argsort().cpu(), probs.argmax(1), y.reshape(-1).cpu()

    def plate(index: Tensor, name: str, caption: str) -> Plate:
        titles = [
            f"{guess[i]}: {probs[i].max():.0%}" + (f" ({labels[i]})" if guess[i] != labels[i] else "") for i in index
        ]
        return _plate(draw.example_images(x[index], titles), name, caption)

    plates = [
        plate(
            order.flip(0)[:_SHOWN], "uncertain", "Least certain: class and its probability (the true one if another)."
        ),
        plate(order[:_SHOWN], "certain", "Most certain."),
    ]
    return Section("Examples", plates=plates)
