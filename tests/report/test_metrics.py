"""Metrics against definitions written out."""

import pytest
import torch
from problems import Problem

from ntkgp.report import metrics

PROBS = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.45, 0.55], [0.2, 0.8]])
Y = torch.tensor([0, 1, 1, 1])


def test_simple_scores():
    assert metrics.accuracy(PROBS, Y) == pytest.approx(0.75)
    assert metrics.brier(PROBS, Y) == pytest.approx(2 * (0.1**2 + 0.6**2 + 0.45**2 + 0.2**2) / 4)


def test_calibration_errors_by_hand():
    # confidences .9 .6 .55 .8, hits 1 0 1 1, in four bins of width 1/4: .55 and .6 share the third
    gaps = [abs(0.575 - 0.5), abs(0.85 - 1.0)]
    assert metrics.expected_calibration_error(PROBS, Y, bins=4) == pytest.approx((2 * gaps[0] + 2 * gaps[1]) / 4)
    assert metrics.maximum_calibration_error(PROBS, Y, bins=4) == pytest.approx(max(gaps))
    assert metrics.expected_calibration_error(PROBS, Y, bins=2, adaptive=True) == pytest.approx(sum(gaps) / 2)
    assert metrics.root_mean_squared_calibration_error(PROBS, Y, bins=2) == pytest.approx(
        ((gaps[0] ** 2 + gaps[1] ** 2) / 2) ** 0.5
    )


def test_perfect_calibration_has_no_error():
    torch.manual_seed(0)
    p = torch.rand(200000)
    y = (torch.rand(200000) < p).long()
    probs = torch.stack([1 - p, p], -1)
    assert metrics.expected_calibration_error(probs, y) < 0.005
    assert metrics.expected_calibration_error(probs**2 / (probs**2).sum(-1, keepdim=True), y) > 0.05


def test_certainty_belongs_to_the_last_bin():
    mean, hits, share = metrics.reliability(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert (mean[-1], hits[-1], share[-1]) == (1, 1, 1)


def test_auc_counts_pairs():
    inside, outside = torch.tensor([0.1, 0.4, 0.4]), torch.tensor([0.4, 0.9])
    pairs = [(b > a) + 0.5 * (b == a) for a in inside for b in outside]
    assert metrics.ood_auc(inside, outside) == pytest.approx(float(sum(pairs)) / 6)
    with pytest.raises(ValueError, match="inside must be a vector"):
        metrics.ood_auc(torch.zeros(2, 2), outside)


def test_coverage_and_density_of_a_prediction(float64):
    problem = Problem("mlp", "gaussian")
    prediction = problem.fit("function").predict(problem.x_new)
    y = prediction.mean + 1.5 * prediction.variance.sqrt()
    assert metrics.interval_coverage(prediction, y, 0.95) == 1
    assert metrics.interval_coverage(prediction, y, 0.8) == 0
    assert metrics.negative_log_likelihood(prediction, y) == pytest.approx(-prediction.log_prob(y).mean().item())
    with pytest.raises(ValueError, match="level must be between 0 and 1, but is 2"):
        metrics.interval_coverage(prediction, y, 2)


@pytest.mark.parametrize(
    ("probs", "y", "error", "match"),
    [
        (PROBS[:, 0], Y, ValueError, r"probs must have shape \(N, K\)"),
        (PROBS, Y[:2], ValueError, "a class for each of 4 points, but has 2"),
        (PROBS, Y.float(), TypeError, "integer class indices"),
    ],
)
def test_bad_input_is_named(probs, y, error, match):
    with pytest.raises(error, match=match):
        metrics.accuracy(probs, y)


def test_psnr_by_hand():
    truth = torch.tensor([[0.0, 2.0]])
    assert metrics.psnr(truth + 0.2, truth) == pytest.approx(20.0)
    with pytest.raises(ValueError, match=r"x must have the truth's shape \(1, 2\), but has \(2,\)"):
        metrics.psnr(truth[0], truth)
