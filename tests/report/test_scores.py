"""Scores and their errors, against definitions written out and against repeated draws."""

import math

import pytest
import torch
from problems import Problem

import ntkgp
from ntkgp.report import metrics
from ntkgp.report.scores import Score, auc, class_probs, compared


def predictions(observation, n=40):
    problem = Problem("mlp", observation, "isotropic", n=n).informed(0.5)
    post = problem.fit("function")
    return problem, post.predict(problem.x, predictive="map"), post.predict(problem.x)


def by_name(observation):
    problem, before, after = predictions(observation)
    return problem.y, before, after, {found.name: found for found in compared(before, after, problem.y)}


def standard_error(values):
    return values.std().item() / len(values) ** 0.5


def test_means_carry_their_standard_errors_and_differences_are_paired(float64):
    y, before, after, found = by_name("categorical")
    a, b = -before.log_prob(y), -after.log_prob(y)
    nll = found["NLL"]
    assert (nll.before.value, nll.after.value) == pytest.approx((a.mean().item(), b.mean().item()))
    assert (nll.before.error, nll.after.error) == pytest.approx((standard_error(a), standard_error(b)))
    assert nll.difference.value == pytest.approx((b - a).mean().item())
    assert nll.difference.error == pytest.approx(standard_error(b - a))
    labels = y.flatten()
    p = after.probs
    assert found["accuracy"].after.value == pytest.approx(metrics.accuracy(p, labels))
    share = found["accuracy"].after.value
    assert found["accuracy"].after.error == pytest.approx(math.sqrt(share * (1 - share) / (len(y) - 1)))
    assert found["Brier score"].after.value == pytest.approx(metrics.brier(p, labels))
    assert found["ECE"].after.value == pytest.approx(metrics.expected_calibration_error(p, labels))
    assert [name for name, s in found.items() if s.better == "higher"] == ["accuracy"]


def test_a_label_is_one_of_two_classes(float64):
    problem, _, several = predictions("bernoulli")
    assert several.probs.shape[1] > 1
    assert class_probs(several) is None  # several labels a point
    post = ntkgp.fit(problem.lin.select(0), (problem.x, problem.y[:, :1]), "bernoulli", "function", tune=False)
    prediction = post.predict(problem.x)
    p = class_probs(prediction)
    assert torch.equal(p[:, 1:], prediction.probs)
    assert torch.allclose(p.sum(1), torch.ones(len(p)))
    found = {s.name: s for s in compared(prediction, prediction, problem.y[:, :1])}
    right = ((prediction.probs > 0.5) == problem.y[:, :1].bool()).double().mean().item()
    assert found["accuracy"].after.value == pytest.approx(right)
    assert found["accuracy"].difference == Score(0.0, 0.0)


def test_regression_has_its_root_mean_square_and_coverage(float64):
    y, before, after, found = by_name("gaussian")
    squares = (y.reshape(after.mean.shape) - after.mean).square().mean(1).detach()
    rmse = found["RMSE"].after
    assert rmse.value == pytest.approx(squares.mean().sqrt().item())
    assert rmse.error == pytest.approx(standard_error(squares) / (2 * rmse.value))
    coverage = found["90% interval holds"]
    assert coverage.after.value == pytest.approx(metrics.interval_coverage(after, y, 0.9))
    assert coverage.before.value == pytest.approx(metrics.interval_coverage(before, y, 0.9))
    assert coverage.better == "nominal"
    assert set(by_name("poisson")[3]) == {"NLL"}


def test_errors_are_those_of_repeated_draws():
    """The spread of AUC and of RMSE over many data sets is what one data set says of itself."""
    generator = torch.Generator().manual_seed(0)
    found = [auc(torch.randn(60, generator=generator), 0.8 + torch.randn(40, generator=generator)) for _ in range(400)]
    values = torch.tensor([s.value for s in found])
    assert values.mean().item() == pytest.approx(0.5 * (1 + math.erf(0.8 / 2)), abs=0.01)
    told = sum(s.error for s in found) / len(found)
    assert told == pytest.approx(values.std().item(), rel=3 * math.sqrt(1 / (2 * 400)))


def test_auc_is_that_of_scikit_learn_and_its_error_is_written_out():
    a, b = torch.tensor([0.1, 0.4, 0.4, 0.7]), torch.tensor([0.4, 0.9, 0.5])
    wins = (b.unsqueeze(0) > a.unsqueeze(1)).double() + 0.5 * (b.unsqueeze(0) == a.unsqueeze(1)).double()
    score = auc(a, b)
    assert score.value == pytest.approx(wins.mean().item())
    assert score.error == pytest.approx(math.sqrt(wins.mean(1).var() / 4 + wins.mean(0).var() / 3))


def test_a_calibration_error_is_resampled(float64):
    y, _, after, found = by_name("categorical")
    generator = torch.Generator().manual_seed(5)
    index = [torch.randint(len(y), (len(y),), generator=generator) for _ in range(300)]
    draws = [metrics.expected_calibration_error(after.probs[i], y.flatten()[i]) for i in index]
    assert found["ECE"].after.error == pytest.approx(torch.tensor(draws).std().item(), rel=0.25)


@pytest.mark.parametrize(
    ("score", "text"),
    [
        (Score(0.38012, 0.0791), "0.380 ± 0.079"),
        (Score(12.3456, 1.26), "12.3 ± 1.3"),
        (Score(-120.2, 31.0), "-120 ± 31"),
        (Score(1.0, 0.0), "1 ± 0"),
        (Score(0.5, float("nan")), "0.5 ± nan"),
    ],
)
def test_as_many_digits_as_the_error_allows(score, text):
    assert str(score) == text
