"""Conjugate gradients against a dense solve."""

import torch
from torch.testing import assert_close

from ntkgp.solvers import conjugate_gradients


def problem():
    root = torch.randn(30, 30)
    A = root @ root.mT + torch.diag(torch.logspace(0, 4, 30))
    return A, torch.randn(30)


def test_it_solves_the_system_and_reports_the_residual(float64):
    A, b = problem()
    found = conjugate_gradients(lambda v: A @ v, b, lambda v: v / A.diagonal(), 1e-12, 500)
    assert_close(found.x, torch.linalg.solve(A, b), rtol=1e-8, atol=1e-12)
    assert found.residual <= 1e-12
    assert (b - A @ found.x).norm() / b.norm() <= 1e-11


def test_a_good_preconditioner_saves_iterations(float64):
    A, b = problem()
    plain = conjugate_gradients(lambda v: A @ v, b, lambda v: v, 1e-8, 500)
    exact = conjugate_gradients(lambda v: A @ v, b, lambda v: torch.linalg.solve(A, v), 1e-8, 500)
    assert exact.iterations == 1
    assert plain.iterations > 10


def test_a_budget_is_kept_and_told(float64):
    A, b = problem()
    found = conjugate_gradients(lambda v: A @ v, b, lambda v: v, 1e-12, 3)
    assert found.iterations == 3
    assert found.residual > 1e-12


def test_nothing_to_solve_is_solved():
    found = conjugate_gradients(lambda v: v, torch.zeros(4), lambda v: v, 1e-6, 10)
    assert not found.x.any()
    assert (found.residual, found.iterations) == (0.0, 0)
