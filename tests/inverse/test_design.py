"""Choosing projections, against dense information gains."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ntkgp.inverse import RayTransform
from ntkgp.inverse.design import next_angle

SIZE, NOISE = 8, 0.3


def candidates() -> RayTransform:
    return RayTransform.parallel(SIZE, 6)


def projections(A: RayTransform) -> Tensor:  # (angles, detectors, pixels)
    n = SIZE * SIZE
    return A(torch.eye(n).view(n, 1, SIZE, SIZE))[:, 0].movedim(0, -1)


def information(A: Tensor, Sigma: Tensor) -> Tensor:
    return torch.logdet(torch.eye(len(A)) + A @ Sigma @ A.mT / NOISE) / 2


def given(A: Tensor, Sigma: Tensor) -> Tensor:
    return Sigma - Sigma @ A.mT @ torch.linalg.solve(A @ Sigma @ A.mT + NOISE * torch.eye(len(A)), A @ Sigma)


@pytest.mark.parametrize("S", [5, 40])
def test_greedy_choices_and_gains_are_those_of_the_sample_covariance(S, float64):
    A, X = candidates(), torch.randn(S, 1, SIZE, SIZE)
    X = X - X.mean(0)
    Sigma, P, taken = X.flatten(1).mT @ X.flatten(1) / S, projections(A), []
    found = next_angle(X + 3.0, A, NOISE, count=3)  # the mean does not matter
    for choice, scores in zip(found.chosen, found.scores, strict=True):
        gains = torch.stack([information(part, Sigma) for part in P])
        left = [a for a in range(6) if a not in taken]
        assert_close(scores[left], gains[left], rtol=1e-9, atol=1e-10)
        assert choice == max(left, key=lambda a: gains[a].item())
        assert torch.isneginf(scores[taken]).all()
        Sigma = given(P[choice], Sigma)
        taken.append(choice)
    assert_close(found.angles, torch.tensor(found.chosen) * (math.pi / 6))


def test_gains_of_a_batch_add_up_to_that_of_all_of_it(float64):
    A, X = candidates(), torch.randn(20, 1, SIZE, SIZE)
    found = next_angle(X, A, NOISE, count=3)
    X = (X - X.mean(0)).flatten(1)
    together = information(projections(A)[found.chosen].flatten(0, 1), X.mT @ X / 20)
    assert_close(sum(s[a] for s, a in zip(found.scores, found.chosen, strict=True)), together, rtol=1e-9, atol=0)


def test_variance_is_the_trace_and_stripes_are_looked_along(float64):
    A = RayTransform.parallel(SIZE, 4)
    stripes = torch.randn(30, 1, 1, SIZE).expand(30, 1, SIZE, SIZE)  # constant down the columns
    for criterion in ("information", "variance"):
        assert next_angle(stripes, A, NOISE, criterion=criterion).chosen == [0]  # rays run down the columns
    centred = stripes - stripes.mean(0)
    scores = next_angle(stripes, A, NOISE, criterion="variance").scores[0]
    assert_close(scores, A(centred)[:, 0].square().sum((0, 2)) / 30)
    assert next_angle(stripes, A, NOISE, taken=(0,)).chosen != [0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"criterion": "entropy"}, "criterion must be one of information, variance, but is 'entropy'"),
        ({"noise": 0.0}, "noise must be positive, but is 0.0"),
        ({"count": 6, "taken": (1,)}, "count must be from 1 to the 5 candidates left, but is 6"),
        ({"taken": (1, 6)}, r"taken must be numbers of the 6 candidates, but has \[6\]"),
        ({"samples": torch.zeros(1, 1, SIZE, SIZE)}, "samples must be at least 2, but are 1"),
    ],
)
def test_bad_input_is_named(options, message):
    arguments = {"samples": torch.zeros(3, 1, SIZE, SIZE), "candidates": candidates(), "noise": NOISE} | options
    with pytest.raises(ValueError, match=message):
        next_angle(**arguments)
