"""Powers of a likelihood, averaged: values by quadrature, derivatives by differences."""

import pytest
import torch
from observations import BY_NAME
from torch.testing import assert_close

from ntkgp.likelihoods import expected, tilted

SCALAR = ["gaussian", "noise by output", "bernoulli", "poisson"]


def setting(name, n=5):
    observation = BY_NAME[name]
    C = observation.outputs
    likelihood = observation.make().to(torch.float64)
    y = likelihood.validate(observation.targets(n, C), C)
    A = torch.randn(n, C, C)
    return likelihood, y, torch.randn(n, C), 0.3 * A @ A.mT


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("name", SCALAR)
def test_it_is_the_integral(name, alpha, float64):
    likelihood, y, mean, blocks = setting(name)
    z = torch.linspace(-9, 9, 4001)
    w = (-z.square() / 2).exp() / (-z.square() / 2).exp().sum()
    f = mean + z[:, None, None] * blocks.diagonal(dim1=-2, dim2=-1).sqrt()
    powers = (alpha * likelihood.site_log_prob(y, f)).exp()
    weights = torch.rand(5)
    truth = (weights.unsqueeze(-1) * torch.tensordot(w, powers, 1).log() / alpha).sum()
    found = tilted(likelihood, y, mean, blocks, alpha, weights)
    assert_close(found.log_prob, truth, rtol=1e-7, atol=0)
    assert found.standard_error == 0
    omega = w[:, None, None] * powers
    omega, r = omega / omega.sum(0), likelihood.residual(y, f)
    R = likelihood.site_root(y, f)[..., 0, 0]
    each = weights.unsqueeze(-1)
    assert_close(found.r, each * (omega * r).sum(0), rtol=1e-4, atol=1e-6)  # what 32 nodes resolve
    curvature = each * (omega * (R.square() - alpha * r.square())).sum(0)
    assert_close(found.curvature.values[..., 0, 0], curvature, rtol=1e-4, atol=1e-4)  # a difference of terms near one


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("name", SCALAR)
def test_residual_and_curvature_are_its_derivatives(name, alpha, float64):
    likelihood, y, mean, blocks = setting(name)
    found = tilted(likelihood, y, mean, blocks, alpha)
    direction, spread, h = torch.randn_like(mean), torch.rand(5, 3).diag_embed(), 1e-5

    def value(s, t):
        return tilted(likelihood, y, mean + s * direction, blocks + t * spread, alpha).log_prob

    with torch.no_grad():
        assert_close((found.r * direction).sum(), (value(h, 0) - value(-h, 0)) / (2 * h), rtol=1e-4, atol=1e-7)
        slope = (value(0, h) - value(0, -h)) / (2 * h)
        assert_close(-(found.curvature.dense() * spread).sum() / 2, slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["categorical", "pixels"])
def test_draws_for_classes_come_close_within_their_error(name, float64):
    likelihood, y, mean, blocks = setting(name)
    truth, other = (tilted(likelihood, y, mean, blocks, 1.0, num_samples=40_000, seed=s) for s in (1, 2))
    found = tilted(likelihood, y, mean, blocks, 1.0, num_samples=2000, seed=3)
    assert 0 < truth.standard_error < found.standard_error
    assert abs((truth.log_prob - other.log_prob).item()) < 5 * truth.standard_error
    assert abs((found.log_prob - truth.log_prob).item()) < 5 * found.standard_error
    assert_close(truth.r, other.r, rtol=0, atol=0.03)
    assert_close(truth.curvature.values, other.curvature.values, rtol=0, atol=0.03)
    h, direction = 1e-3, torch.randn_like(mean)
    up, down = (tilted(likelihood, y, mean + s * direction, blocks, 1.0, num_samples=40_000, seed=1) for s in (h, -h))
    slope = (up.log_prob - down.log_prob) / (2 * h)
    assert_close((truth.r * direction).sum(), slope, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["gaussian", "categorical"])
def test_a_small_power_is_the_logarithm(name, float64):
    likelihood, y, mean, blocks = setting(name)
    weights = torch.rand(5)
    found, truth = tilted(likelihood, y, mean, blocks, 1e-6, weights), expected(likelihood, y, mean, blocks, weights)
    assert_close(found.log_prob, truth.log_prob, rtol=1e-4, atol=0)
    assert_close(found.r, truth.r, rtol=1e-4, atol=1e-5)
    assert_close(found.curvature.values, truth.curvature.values, rtol=1e-4, atol=1e-5)


def test_it_is_differentiable_in_the_noise(float64):
    likelihood, y, mean, blocks = setting("gaussian")
    (gradient,) = torch.autograd.grad(tilted(likelihood, y, mean, blocks, 0.5).log_prob, likelihood.raw_noise)
    values = []
    with torch.no_grad():
        for h in (1e-5, -1e-5):
            likelihood.raw_noise.add_(h)
            values.append(tilted(likelihood, y, mean, blocks, 0.5).log_prob)
            likelihood.raw_noise.sub_(h)
    assert_close(gradient, (values[0] - values[1]) / 2e-5, rtol=1e-6, atol=0)
