"""The ascent finds maxima, and survives places where nothing can be evaluated."""

import pytest
import torch
from torch import nn

from ntkgp.evidence import maximise


def rosenbrock(p):
    return -((1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2)


def test_it_climbs_a_curved_ridge(float64):
    p = nn.Parameter(torch.tensor([-1.0, 1.0]))
    values = [step.value for step in maximise(lambda: rosenbrock(p), [p], 200, 1e-8)]
    assert values == sorted(values)
    assert p.tolist() == pytest.approx([1.0, 1.0], abs=1e-4)


def test_failures_are_walls_not_ends(float64):
    p = nn.Parameter(torch.tensor([0.0]))

    def objective():
        if p.item() > 1.3:
            raise torch.linalg.LinAlgError("not positive definite")
        if p.item() > 1.2:
            return (p * torch.nan).sum()
        return -((p - 1.1) ** 4).sum() + 0.01 * p.sum()

    steps = list(maximise(objective, [p], 100, 1e-7))
    assert p.item() == pytest.approx(1.2, abs=0.1)
    assert steps[-1].value > steps[0].value


def test_a_start_without_a_value_is_an_error(float64):
    p = nn.Parameter(torch.tensor([torch.nan]))
    with pytest.raises(RuntimeError, match="cannot be evaluated"):
        list(maximise(lambda: p.sum(), [p], 10, 1e-6))


def test_no_step_is_longer_than_its_bound(float64):
    p = nn.Parameter(torch.tensor([0.0]))
    visited = []

    def objective():
        visited.append(p.item())
        return 1e6 * p.sum()

    list(maximise(objective, [p], 3, 1e-12))
    assert visited[1] == pytest.approx(2.0)
