"""What plots show is what they were given, on the axes they were given."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from problems import Problem

from ntkgp.report import figures, metrics
from ntkgp.report.figures.axes import AFTER, BEFORE
from ntkgp.report.scores import auc


@pytest.fixture
def ax():
    return Figure().add_subplot()


def probabilities(n=100, K=3):
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(n, K, generator=generator, dtype=torch.float64)
    return probs / probs.sum(1, keepdim=True), torch.randint(K, (n,), generator=generator)


def test_reliability_has_a_point_with_its_error_for_each_bin(ax):
    probs, y = probabilities()
    assert figures.reliability_diagram(probs, y, bins=5, ax=ax, label="posterior") is ax
    mean, hits, share = metrics.reliability(probs, y, 5, adaptive=True)
    points = ax.containers[0]
    x, h = points.lines[0].get_data()
    assert x == pytest.approx(mean.numpy())
    assert h == pytest.approx(hits.numpy())
    (low, high), *_ = [segment[:, 1] for segment in points.lines[2][0].get_segments()]
    assert (high - low) / 2 == pytest.approx(math.sqrt(hits[0] * (1 - hits[0]) / (share[0] * 100)))
    figures.reliability_diagram(probs, y, ax=ax, label="network", color=BEFORE)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["calibrated", "posterior", "network"]


def test_a_share_of_one_is_not_certain(ax):
    probs, y = torch.tensor([[0.9, 0.1]] * 10), torch.zeros(10, dtype=torch.long)
    figures.reliability_diagram(probs, y, bins=1, ax=ax)
    ((low, high),) = [segment[:, 1] for segment in ax.containers[0].lines[2][0].get_segments()]
    safe = 10.5 / 11
    assert (low, high) == pytest.approx((1 - math.sqrt(safe * (1 - safe) / 10), 1))


def test_histograms_are_shares_on_common_bins(ax):
    inside, outside = torch.linspace(0, 1, 50), torch.linspace(0.5, 2, 10)
    figures.uncertainty_histogram(inside, outside, "entropy", ax)
    one, two = ax.containers
    assert sum(bar.get_height() for bar in one) == pytest.approx(1)
    assert sum(bar.get_height() for bar in two) == pytest.approx(1)
    assert [bar.get_x() for bar in one] == [bar.get_x() for bar in two]
    assert ax.get_xlabel() == "entropy"
    assert len(figures.uncertainty_histogram(torch.ones(4)).containers) == 1


def test_the_area_under_the_detection_curve_is_the_auc(ax):
    generator = torch.Generator().manual_seed(1)
    inside, outside = torch.randn(80, generator=generator), 1 + torch.randn(50, generator=generator)
    outside[:5] = inside[:5]  # ties
    figures.detection_curve(inside, outside, ax, "entropy")
    x, y = (np.asarray(part) for part in ax.lines[1].get_data())
    assert np.trapezoid(y, x) == pytest.approx(metrics.ood_auc(inside, outside))
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 1, 1)
    assert ax.lines[1].get_label() == f"entropy: AUC {auc(inside, outside)}"


def test_bands_are_two_standard_deviations(ax, float64):
    prediction = SimpleNamespace(
        mean=torch.tensor([[1.0], [0.0]]),
        epistemic=torch.tensor([[0.25], [1.0]]),
        variance=torch.tensor([[1.0], [4.0]]),
    )
    figures.prediction_bands(torch.tensor([[2.0], [1.0]]), torch.tensor([1.5, 0.5]), prediction, ax=ax)
    of_y, of_f = (band.get_paths()[0].vertices for band in ax.collections)
    assert (of_y[:, 1].min(), of_y[:, 1].max()) == (-4, 4)
    assert (of_f[:, 1].min(), of_f[:, 1].max()) == (-2, 2)
    x, mean = ax.lines[0].get_data()
    assert (list(x), list(mean)) == ([1, 2], [0, 1])  # in the order of the inputs
    other = figures.prediction_bands(torch.zeros(2, 3), torch.tensor([1.5, 0.5]), prediction)
    targets, mean = other.containers[0].lines[0].get_data()
    assert (list(targets), list(mean)) == ([1.5, 0.5], [1, 0])
    (low, high), _ = [segment[:, 1] for segment in other.containers[0].lines[2][0].get_segments()]
    assert (low, high) == (-1, 3)


def test_coverage_is_that_of_the_metrics(ax, float64):
    problem = Problem("mlp", "gaussian", "isotropic")
    prediction = problem.fit("function").predict(problem.x)
    figures.coverage_curve(prediction, problem.y, ax, "posterior")
    levels, held = ax.containers[0].lines[0].get_data()
    assert list(held) == [metrics.interval_coverage(prediction, problem.y, level) for level in levels]
    assert (levels[0], levels[-1], len(levels)) == (0.05, 0.95, 19)


def test_evidence_is_drawn_step_by_step(ax):
    figures.evidence_curve([{"log_evidence": -3.0}, {"log_evidence": -1.0, "noise": 2.0}], ax)
    assert list(ax.lines[0].get_ydata()) == [-3, -1]
    assert ax.get_ylabel() == "log evidence"
    sampled = figures.evidence_curve([{"effective_parameters": [1.0, 2.0]}])
    assert list(sampled.lines[0].get_ydata()) == [3]
    with pytest.raises(ValueError, match="history must hold steps of tuning, but holds none"):
        figures.evidence_curve([])


def test_groups_are_drawn_in_their_order(ax):
    figures.group_points({"first": 1.0, "last": 10.0}, "γ", ax, of={"first": 4.0, "last": 20.0})
    behind, points = ax.lines
    assert list(behind.get_xdata()) == [4, 20]
    assert list(points.get_xdata()) == [1, 10]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["first", "last"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # from the top
    assert points.get_color() == AFTER


def test_images_are_scaled_and_titled(ax):
    x = torch.zeros(5, 1, 4, 4)
    x[1, 0, 2, 3] = 7.0
    figures.example_images(x, [str(i) for i in range(5)], columns=3, ax=ax)
    assert [text.get_text() for text in ax.texts] == ["0", "1", "2", "3", "4"]
    assert ax.images[1].get_array().max() == 1
    assert ax.images[1].get_array()[2, 3] == 1
    assert len(ax.images) == 5
    colours = figures.example_images(torch.rand(2, 3, 4, 4), ["a", "b"])
    assert colours.images[0].get_array().shape == (4, 4, 3)
    with pytest.raises(ValueError, match=r"x must hold images .* but has \(5, 2, 4, 4\)"):
        figures.example_images(x.expand(5, 2, 4, 4), [""] * 5)
    with pytest.raises(ValueError, match="titles must be 5, one for each image, but are 1"):
        figures.example_images(x, [""])
