"""Mistakes that others made with deep image priors, each kept out by a test."""

import pytest
import torch
from torch.distributions import Normal
from torch.testing import assert_close

from ntkgp.inverse import Draws, RayTransform, UNet, reconstruct
from ntkgp.likelihoods import Gaussian
from ntkgp.posteriors.tuning import squared_errors
from ntkgp.solvers import Nystrom


@pytest.fixture
def rec(float64):
    A = RayTransform.parallel(8, 4)
    x = torch.zeros(1, 1, 8, 8)
    x[..., 2:6, 3:6] = 0.7
    torch.manual_seed(1)
    return reconstruct(A, A(x), UNet(channels=3, scales=2, skip=2), steps=30, rate=1e-2, tune=None, noise=0.01)


def test_residuals_are_squared_before_they_are_summed(rec):
    post = rec.posterior
    delta = torch.randn_like(rec.pixels.theta)
    r = post.model.data.y - post.model.f() - post.model.push(delta.unsqueeze(0))[0]
    squares, n = squared_errors(post, delta)
    assert_close(squares.sum(), r.square().sum())
    assert squares.sum().item() != pytest.approx(r.sum().item() ** 2, rel=0.1)
    assert n.sum() == r.numel()


def test_noise_is_a_variance_and_not_a_standard_deviation(rec):
    y, f = torch.tensor([[0.3]]), torch.tensor([[0.1]])
    expected = Normal(f, 0.01**0.5).log_prob(y).sum()
    assert_close(Gaussian(0.01).to(y).weighted_log_prob(y, f, None), expected)
    post = rec.posterior
    J = post.lin.jacobian(rec._z)[0]
    Syy = J @ post.prior.covariance().to_dense() @ J.mT + 0.01 * torch.eye(len(J))
    S, n = post._factor()[0], len(J)
    assert_close(0.01 * (S @ S.mT).tril() + 0.01 * (S @ S.mT).tril(-1).mT, Syy, rtol=1e-8, atol=1e-10)
    assert n == post.lin.num_outputs


def test_the_derivative_of_the_log_determinant_in_the_noise_is_the_trace_of_the_inverse(rec):
    post = rec.posterior
    post.likelihood.raw_noise.requires_grad_(True)
    (g,) = torch.autograd.grad(post._log_det(), post.likelihood.raw_noise)
    J = post.lin.jacobian(rec._z)[0]
    K, noise = J @ post.prior.covariance().to_dense() @ J.mT, 0.01
    # log |B| = log |K + σ² I| − d log σ²
    inverse = torch.linalg.inv(K + noise * torch.eye(len(K)))
    by_noise = inverse.trace() - len(K) / noise
    step = 1e-6
    raw = post.likelihood.raw_noise.detach().clone()
    with torch.no_grad():
        post.likelihood.raw_noise += step
    slope = (post.likelihood.noise - noise) / step  # ∂σ²/∂raw
    with torch.no_grad():
        post.likelihood.raw_noise.copy_(raw)
    assert_close(g, (by_noise * slope).detach().reshape(g.shape), rtol=1e-5, atol=0)


def test_a_preconditioner_is_symmetric_and_positive(float64):
    M = torch.randn(30, 30)
    A = M @ M.mT
    found = Nystrom.sketch(lambda v: v @ A, A, 30, 10, torch.Generator().manual_seed(0))
    assert found.U.dtype == torch.float64  # not complex
    assert_close(found.U @ found.U.mT, torch.eye(10), rtol=0, atol=1e-10)
    P = found.preconditioner(0.1)(torch.eye(30))
    assert_close(P, P.mT, rtol=0, atol=1e-12)
    assert torch.linalg.eigvalsh(P)[0] > 0


def test_the_preconditioner_of_reconstructions_is_symmetric_and_positive(float64):
    A = RayTransform.parallel(8, 4)
    torch.manual_seed(1)
    net = UNet(channels=3, scales=2, skip=2)
    sampled = reconstruct(
        A, A(torch.rand(1, 1, 8, 8)), net, steps=2, tune=None, noise=0.01, method="sampled", sketch=20
    )
    P = sampled.posterior._precondition(torch.eye(sampled.pixels.num_params))
    assert_close(P, P.mT, rtol=0, atol=1e-10 * P.abs().max().item())
    assert torch.linalg.eigvalsh(P)[0] > 0


def test_layers_of_equal_shape_have_draws_of_their_own(rec):
    for draw in (rec.posterior.sample_weights, lambda n, g: prior_weights(rec, n, g)):
        theta = rec.pixels.layout.split(draw(2, torch.Generator().manual_seed(0)) - rec.pixels.theta)
        equal = [v for v in theta.values() if v.shape[1:] == (3, 3, 3, 3)]
        assert len(equal) >= 2
        assert (equal[0] - equal[1]).abs().min() > 0
        assert (equal[0][0] - equal[0][1]).abs().min() > 0


def prior_weights(rec, n, generator):
    """Return the weights behind the images that ``sample_prior`` draws."""
    seen: list[torch.Tensor] = []
    jvp = rec.pixels.jvp
    rec.pixels.jvp = lambda z, v: seen.append(v) or jvp(z, v)
    try:
        rec.sample_prior(n, generator)
    finally:
        del rec.pixels.jvp
    return seen[0] + rec.pixels.theta


def test_gradients_are_held_to_differences_closely_enough_to_see_a_factor_of_two(rec):
    for p in rec.posterior.prior.parameters():
        (g,) = torch.autograd.grad(rec.log_evidence(), p)
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                p.view(-1)[0] += step
            values.append(rec.log_evidence().item())
            with torch.no_grad():
                p.view(-1)[0] -= step
        assert g.view(-1)[0].item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4)


def test_a_floor_is_added_to_the_diagonal_only(float64):
    draws = Draws(torch.randn(40, 1, 2, 2))
    x, floor = torch.randn(1, 2, 2), 0.3
    Sigma = draws.covariance()
    left = (x - draws.mean).flatten()

    def log_normal(C: torch.Tensor) -> float:
        return torch.distributions.MultivariateNormal(torch.zeros(4), C).log_prob(left).item() / 4

    assert draws.log_likelihood(x, 2, floor) == pytest.approx(log_normal(Sigma + floor * torch.eye(4)), rel=1e-10)
    assert draws.log_likelihood(x, 2, floor) != pytest.approx(log_normal(Sigma + floor + 1e-9 * torch.eye(4)), rel=0.01)
