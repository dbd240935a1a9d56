"""Conjugate gradients against a dense solve."""

import math

import torch
from torch.testing import assert_close

from ntkgp.solvers import conjugate_gradients


def problem(rows=3):
    root = torch.randn(30, 30)
    A = root @ root.mT + torch.diag(torch.logspace(0, 4, 30))
    return A, torch.randn(rows, 30)


def test_it_solves_every_row_and_reports_the_residuals(float64):
    A, b = problem()
    b[1] *= 1e6
    found = conjugate_gradients(lambda v: v @ A, b, lambda v: v / A.diagonal(), 1e-12, 500)
    assert_close(found.x, torch.linalg.solve(A, b.mT).mT, rtol=1e-8, atol=1e-12)
    assert (found.residuals <= 1e-12).all()
    left, root = b - found.x @ A, A.diagonal().rsqrt()
    assert ((left * root).norm(dim=1) / (b * root).norm(dim=1) <= 1e-11).all()
    assert found.products == 3 * found.iterations


def test_a_good_preconditioner_saves_iterations(float64):
    A, b = problem()
    plain = conjugate_gradients(lambda v: v @ A, b, lambda v: v, 1e-8, 500)
    exact = conjugate_gradients(lambda v: v @ A, b, lambda v: torch.linalg.solve(A, v.mT).mT, 1e-8, 500)
    assert exact.iterations == 1
    assert plain.iterations > 10


def test_a_warm_start_saves_iterations_and_counts_its_product(float64):
    A, b = problem()
    cold = conjugate_gradients(lambda v: v @ A, b, lambda v: v / A.diagonal(), 1e-10, 500)
    near = torch.linalg.solve(A, b.mT).mT * (1 + 1e-7)
    warm = conjugate_gradients(lambda v: v @ A, b, lambda v: v / A.diagonal(), 1e-10, 500, start=near)
    assert_close(warm.x, cold.x, rtol=1e-7, atol=1e-12)
    assert warm.iterations < cold.iterations
    assert warm.products == 3 * (warm.iterations + 1)


def test_a_start_of_the_wrong_size_is_as_good(float64):
    A, b = problem()
    near = torch.linalg.solve(A, b.mT).mT * (1 + 1e-7 * torch.randn(3, 30))
    found = [
        conjugate_gradients(lambda v: v @ A, b, lambda v: v / A.diagonal(), 1e-10, 500, start=k * near) for k in (1, 7)
    ]
    assert found[0].iterations == found[1].iterations < 30
    assert_close(found[0].x, found[1].x, rtol=1e-9, atol=1e-12)


def test_a_row_that_has_converged_stays_where_it_is(float64):
    A, b = problem(2)
    start = torch.stack([torch.linalg.solve(A, b[0]), torch.zeros(30)])
    found = conjugate_gradients(lambda v: v @ A, b, lambda v: v, 1e-8, 500, start=start)
    assert_close(found.x[0], start[0], rtol=1e-10, atol=0)
    assert_close(found.x[1], torch.linalg.solve(A, b[1]), rtol=1e-4, atol=1e-8)


def test_budgets_are_kept_and_told(float64):
    A, b = problem()
    found = conjugate_gradients(lambda v: v @ A, b, lambda v: v, 1e-12, 3)
    assert found.iterations == 3
    assert found.residual > 1e-12
    assert conjugate_gradients(lambda v: v @ A, b, lambda v: v, 1e-12, 500, seconds=0.0).iterations == 0


def test_nothing_to_solve_is_solved():
    found = conjugate_gradients(lambda v: v, torch.zeros(1, 4), lambda v: v, 1e-6, 10)
    assert not found.x.any()
    assert (found.residual, found.iterations) == (0.0, 0)


def test_several_starts_are_combined(float64):
    A, b = problem()
    solution = torch.linalg.solve(A, b.mT).mT
    other = torch.randn_like(b)
    starts = torch.stack([solution - 3 * other, 2 * other])
    found = conjugate_gradients(lambda v: v @ A, b, lambda v: v / A.diagonal(), 1e-8, 500, starts)
    assert found.iterations == 0
    assert found.products == 2 * len(b)
    assert_close(found.x, solution, rtol=1e-8, atol=1e-12)
    same = torch.stack([other, other])
    one, two = (
        conjugate_gradients(lambda v: v @ A, b, lambda v: v / A.diagonal(), 1e-8, 500, start) for start in (other, same)
    )
    assert two.iterations == one.iterations


def test_a_start_that_is_good_enough_spares_the_others(float64):
    A, b = problem()
    solution = torch.linalg.solve(A, b.mT).mT
    starts = torch.stack([solution, torch.randn_like(b)])
    found = conjugate_gradients(lambda v: v @ A, b, lambda v: v / A.diagonal(), 1e-8, 500, starts)
    assert (found.iterations, found.products) == (0, len(b))
    assert_close(found.x, solution, rtol=1e-8, atol=1e-12)


def test_a_preconditioner_that_is_not_positive_is_no_convergence(float64):
    M = torch.randn(8, 8)
    A, b = M @ M.mT + torch.eye(8), torch.randn(2, 8)
    found = conjugate_gradients(lambda v: v @ A, b, lambda v: v * torch.tensor([-50.0] + 7 * [1.0]), 1e-6, 50)
    assert (b - found.x @ A).norm() > 1e-3
    assert found.residual == math.inf
