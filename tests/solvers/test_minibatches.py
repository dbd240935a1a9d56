"""Stochastic descents, primal and dual, against a dense solve."""

import pytest
import torch
from torch.testing import assert_close

from ntkgp.solvers import Rows, dual_descent, gradient_descent, largest_eigenvalue

ROWS, COLUMNS, SIZE = 40, 12, 8


class System:
    """(Aᵀ A + S⁻¹) x = b with a diagonal S, seen by minibatches of points with two rows each."""

    def __init__(self):
        self.A = torch.randn(ROWS, 2, COLUMNS)
        self.s = torch.linspace(0.5, 2.0, COLUMNS)
        self.b = torch.randn(3, COLUMNS)
        self.b[1] *= 1e3
        self.seen = []

    def batches(self, epoch):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
        for which in order.split(SIZE):
            part = self.A[which]
            self.seen.append(len(which))
            yield Rows(
                which,
                len(which) / ROWS,
                lambda x, part=part: torch.einsum("icn,sn->sic", part, x),
                lambda u, part=part: torch.einsum("icn,sic->sn", part, u),
            )

    @property
    def H(self):
        flat = self.A.flatten(0, 1)
        return flat.mT @ flat + torch.diag(1 / self.s)

    def inverse(self, x):
        return x / self.s

    def covariance(self, x):
        return x * self.s

    def precondition(self, v):
        return torch.linalg.solve(self.H + 0.3 * torch.diag(self.H.diagonal()), v.mT).mT

    def solve(self, solver, epochs, **options):
        if solver == "dual":
            return dual_descent(self.batches, self.covariance, self.inverse, self.b, (ROWS, 2), epochs, **options)
        return gradient_descent(self.batches, self.inverse, self.b, self.precondition, epochs, **options)

    def error(self, x):
        truth = torch.linalg.solve(self.H, self.b.mT).mT
        return ((x - truth).norm(dim=1) / truth.norm(dim=1)).max()


def test_the_dual_converges_at_a_fixed_rate(float64):
    system = System()
    found = system.solve("dual", 1500)
    assert system.error(found.x) < 1e-9
    assert found.residual < 1e-9
    assert found.x.dtype == torch.float64


def test_the_noise_of_gradients_falls_with_the_epochs(float64):
    system = System()
    short, long = (system.error(system.solve("gradient", n).x) for n in (25, 400))
    assert short < 0.2
    assert long < short / 3  # as the root of their number


@pytest.mark.parametrize("solver", ["gradient", "dual"])
def test_the_residual_is_recomputed_from_all_rows(solver, float64):
    system = System()
    found = system.solve(solver, 3)
    left = system.b - found.x @ system.H
    metric = system.covariance if solver == "dual" else system.precondition
    sizes = [(v * metric(v)).sum(1) for v in (left, system.b)]
    assert_close(found.residuals, (sizes[0] / sizes[1]).sqrt(), rtol=1e-8, atol=0)
    assert found.products == 4 * 3
    assert sum(system.seen) >= 4 * ROWS


@pytest.mark.parametrize("solver", ["gradient", "dual"])
def test_the_solution_stays_where_it_is(solver, float64):
    system = System()
    truth = torch.linalg.solve(system.H, system.b.mT).mT
    if solver == "dual":  # its noise is proportional to the distance
        assert system.error(system.solve(solver, 2, start=truth).x) < 1e-10
    else:
        assert system.error(system.solve(solver, 20, start=truth).x) < system.error(system.solve(solver, 20).x)


def test_the_largest_eigenvalue_is_found_from_below(float64):
    H = System().H
    found = largest_eigenvalue(lambda v: v @ H, torch.zeros(1, COLUMNS), torch.Generator().manual_seed(0))
    truth = torch.linalg.eigvalsh(H)[-1].item()
    assert 0.9 * truth <= found <= truth * (1 + 1e-12)
