"""Empirical covariances of every sampler, within five standard errors."""

import pytest
import torch
from problems import Problem
from torch.testing import assert_close

import ntkgp

S = 4000
METHODS = {
    "function": {},
    "full": {},
    "diag": {},
    "kron": {},
    "low_rank": {"rank": 12},
    "subnetwork": {"subnetwork": 20},
    "last_layer": {"structure": "kron"},
}


def assert_within_five_errors(samples, mean, covariance):  # (S, d), (d,), (d, d)
    variance = covariance.diagonal()
    assert ((samples.mean(0) - mean).abs() <= 5 * (variance / len(samples)).sqrt() + 1e-12).all()
    centred = samples - mean
    products = centred.unsqueeze(-1) * centred.unsqueeze(-2)
    spread = (variance[:, None] * variance[None] + covariance.square()) / len(samples)
    assert ((products.mean(0) - covariance).abs() <= 5 * spread.sqrt() + 1e-12).all()


@pytest.mark.parametrize("method", METHODS)
def test_functions_have_the_latent_distribution(method, float64):
    problem = Problem("cnn" if method == "kron" else "mlp", "categorical", "grouped")
    if method == "last_layer":
        post = ntkgp.fit(problem.lin, (problem.x, problem.y), "categorical", method, tune=False, **METHODS[method])
    else:
        post = problem.fit(method, **METHODS[method])
    draws = post.sample_functions(S, torch.Generator().manual_seed(0))(problem.x_new)
    assert draws.shape == (S, 5, 3)
    q = post.latent(problem.x_new, joint=True)
    assert_within_five_errors(draws.flatten(1), q.mean.flatten(), q.covariance_matrix)


def test_refined_samples_are_centred_at_the_refined_mean(float64):
    problem = Problem("mlp", "poisson")
    post = problem.fit("function").refine()
    draws = post.sample_functions(S, torch.Generator().manual_seed(1))(problem.x_new)
    q = post.latent(problem.x_new, joint=True)
    assert_within_five_errors(draws.flatten(1), q.mean.flatten(), q.covariance_matrix)


def test_seeds_reproduce_bit_for_bit(float64):
    post = Problem().fit("function")
    draw = lambda seed: post.sample_weights(3, torch.Generator().manual_seed(seed))  # noqa: E731
    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


def test_a_subnetwork_leaves_the_other_weights_alone(float64):
    problem = Problem()
    post = problem.fit("subnetwork", subnetwork=7)
    moved = (post.sample_weights(50) - problem.lin.theta).abs().max(0).values > 0
    assert moved.sum() == 7
    assert_close(moved.nonzero().squeeze(-1), post.index)


def test_at_least_one_sample_is_drawn(float64):
    with pytest.raises(ValueError, match="n must be at least 1, but is 0"):
        Problem().fit("diag").sample_weights(0)
