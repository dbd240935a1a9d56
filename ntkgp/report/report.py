"""What a posterior is worth on test data, as one page: scores before and after, figures, and how it was made."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ntkgp.linearization.inputs import Input
from ntkgp.posteriors import Posterior, Prediction
from ntkgp.report.page import page
from ntkgp.report.scores import Comparison, Score, class_probs, compared, is_numeric

__all__ = ["Report", "report"]


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
    seed: int = 0,
) -> Report:
    """Return a page on what the posterior is worth: it needs matplotlib, and no network to be read.

    Args:
        post: the posterior.
        test: (X, y) that it was not fitted to.
        ood: inputs from elsewhere, which it should be uncertain about.
        title: of the page.
        seconds: that fitting took, to be told.
        seed: of the samples that predictions take.

    Raises:
        ImportError: if there is no matplotlib.
        ValueError: if data and posterior do not fit together.
    """
    from ntkgp.report import making, sections  # matplotlib, where it is used

    with _default_style():
        x, y = test
        before, after = _predicted(post, x, seed)
        scores, plates = compared(before, after, y), []
        if class_probs(after) is not None:
            plates = [sections.reliability(before, after, y)]
        elif is_numeric(after):
            plates = sections.regression(x, y, before, after)
        outside = None if ood is None else _predicted(post, ood, seed)
        uncertainty, detection = sections.uncertainty((before, after), outside)
        shown = [sections.scores(scores, len(y), plates), uncertainty, *sections.examples(x, y, after)]
        shown += making.made(post, seconds)
    C = post.lin.num_outputs
    text = (
        f"A network with {post.lin.num_params} Bayesian weights and {C} output{'s' * (C > 1)}, linearised at its "
        f"weights: alone, and with the posterior over them. {len(y)} test points."
    )
    return Report(page(title, text, shown), {s.name: s for s in scores}, detection)


def _predicted(post: Posterior, x: Input, seed: int) -> tuple[Prediction, Prediction]:
    """Return what the network alone and what the posterior predicts."""
    generator = torch.Generator(post.lin.device).manual_seed(seed)
    return post.predict(x, predictive="map"), post.predict(x, generator=generator)


def _default_style() -> Any:
    import matplotlib.style

    return matplotlib.style.context("default")
