"""The Nyström preconditioner against dense algebra."""

import math

import pytest
import torch
from torch.testing import assert_close

from ntkgp.solvers import Nystrom, conjugate_gradients


def decaying(n=60):
    Q = torch.linalg.qr(torch.randn(n, n)).Q
    return (Q * torch.logspace(4, -4, n)) @ Q.mT


def test_a_full_sketch_is_the_matrix(float64):
    A = decaying(20)
    found = Nystrom.sketch(lambda v: v @ A, A, 20, 20)
    assert_close((found.U.mT * found.eigenvalues) @ found.U, A, rtol=1e-6, atol=1e-8)
    assert_close(found.U @ found.U.mT, torch.eye(20), rtol=0, atol=1e-10)


def test_a_sketch_is_as_close_as_theory_says_and_from_below(float64):
    """Frangella, Tropp & Udell 2023, proposition 2.2: a bound on the mean error by the eigenvalues left out."""
    A, k = decaying(), 25
    truth = torch.linalg.eigvalsh(A).flip(0)
    errors = []
    for _ in range(10):
        found = Nystrom.sketch(lambda v: v @ A, A, 60, k)
        errors.append(torch.linalg.matrix_norm(A - (found.U.mT * found.eigenvalues) @ found.U, 2))
        assert (found.eigenvalues <= truth[:k] * (1 + 1e-8)).all()
    bounds = [
        (1 + 2 * (k - p) / (p - 1)) * truth[k - p] + 2 * math.e**2 * k / (p * p - 1) * truth[k - p :].sum()
        for p in range(2, k - 1)
    ]
    assert sum(errors) / 10 <= min(bounds)


def test_the_preconditioner_is_symmetric_and_inverts_what_it_says(float64):
    A, mu = decaying(), 0.3
    found = Nystrom.sketch(lambda v: v @ A, A, 60, 12)
    inverse = found.preconditioner(mu)(torch.eye(60))
    U, e = found.U, found.eigenvalues
    M = (U.mT * ((e + mu) / (e[-1] + mu))) @ U + torch.eye(60) - U.mT @ U
    assert_close(inverse, inverse.mT, rtol=0, atol=1e-10)
    assert_close(inverse @ M, torch.eye(60), rtol=0, atol=1e-8)


def test_it_saves_iterations_where_the_spectrum_decays(float64):
    A, mu, b = decaying(), 1e-2, torch.randn(2, 60)
    shifted = lambda v: v @ A + mu * v  # noqa: E731
    plain = conjugate_gradients(shifted, b, lambda v: v, 1e-8, 1000)
    sketch = Nystrom.sketch(lambda v: v @ A, A, 60, 40)
    found = conjugate_gradients(shifted, b, sketch.preconditioner(mu), 1e-8, 1000)
    assert found.iterations * 5 < plain.iterations
    assert_close(found.x, torch.linalg.solve(A + mu * torch.eye(60), b.mT).mT, rtol=1e-5, atol=1e-5)


def test_seeds_reproduce_it(float64):
    A = decaying()
    draws = [Nystrom.sketch(lambda v: v @ A, A, 60, 9, torch.Generator().manual_seed(s)).U for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_a_rank_that_cannot_be_is_named(float64):
    with pytest.raises(ValueError, match="rank must be between 1 and 60, but is 61"):
        Nystrom.sketch(lambda v: v, torch.zeros(()), 60, 61)
