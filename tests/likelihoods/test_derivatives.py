"""r, Λ and R against automatic differentiation of log p(y | f)."""

import pytest
import torch
from observations import BY_NAME, EXACT, OBSERVATIONS, Scaled, StudentT
from torch.testing import assert_close

from ntkgp.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson

N = 4


def build(observation):
    torch.manual_seed(1)
    likelihood = observation.make().double()
    f = torch.randn(N, observation.outputs)
    return likelihood, likelihood.validate(observation.targets(N, observation.outputs), observation.outputs), f


def hessian(likelihood, y, f):  # (N, C, C)
    blocks = [
        torch.autograd.functional.hessian(lambda v, n=n: likelihood.log_prob(y[n : n + 1], v[None]).sum(), f[n])
        for n in range(len(f))
    ]
    return torch.stack(blocks)


@pytest.mark.parametrize("observation", OBSERVATIONS, ids=lambda o: o.name)
def test_the_residual_is_the_gradient(observation, float64):
    likelihood, y, f = build(observation)
    f.requires_grad_()
    truth = torch.autograd.grad(likelihood.log_prob(y, f).sum(), f)[0]
    assert_close(likelihood.residual(y, f.detach()), truth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("observation", EXACT, ids=lambda o: o.name)
def test_the_curvature_is_the_negative_hessian(observation, float64):
    likelihood, y, f = build(observation)
    assert_close(likelihood.curvature(y, f), -hessian(likelihood, y, f), rtol=1e-8, atol=1e-10)


def test_the_heteroscedastic_curvature_is_the_expected_hessian(float64):
    likelihood, y, f = build(BY_NAME["heteroscedastic"])
    generator = torch.Generator().manual_seed(0)
    draws = [hessian(likelihood, likelihood.sample(f, generator), f) for _ in range(1500)]
    mean, error = torch.stack(draws).mean(0), torch.stack(draws).std(0) / 1500**0.5
    assert ((mean + likelihood.curvature(y, f)).abs() <= 5 * error + 1e-12).all()


@pytest.mark.parametrize("observation", OBSERVATIONS, ids=lambda o: o.name)
def test_the_root_squares_to_the_curvature(observation, float64):
    likelihood, y, f = build(observation)
    R = likelihood.curvature_root(y, f)
    assert_close(R @ R.mT, likelihood.curvature(y, f), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("observation", OBSERVATIONS, ids=lambda o: o.name)
def test_weights_multiply_value_residual_and_curvature_alike(observation, float64):
    likelihood, y, f = build(observation)
    plain, none = likelihood.expand(y, f), likelihood.expand(y, f, torch.zeros(N))
    weighted = likelihood.expand(y, f, torch.full((N,), 3.0))
    assert_close(weighted.log_prob, 3 * plain.log_prob)
    assert_close(weighted.r, 3 * plain.r)
    assert_close(weighted.curvature.values, 3 * plain.curvature.values)
    assert none.log_prob == 0
    assert not none.r.any()
    assert not none.R.values.any()


def test_a_mask_by_site_leaves_out_single_pixels(float64):
    likelihood, y, f = build(BY_NAME["pixels"])
    mask = torch.tensor([[1.0, 0.0]] * N)
    single = Categorical()
    first = f.view(N, 3, 2)[..., 0]
    assert_close(likelihood.expand(y, f, mask).log_prob, single.log_prob(y[:, :1], first).sum())
    assert_close(likelihood.expand(y, f, mask).r.view(N, 3, 2)[..., 0], single.residual(y[:, :1], first))
    assert not likelihood.expand(y, f, mask).r.view(N, 3, 2)[..., 1].any()


def test_pixels_are_points_of_their_own(float64):
    likelihood, y, f = build(BY_NAME["pixels"])
    single = Categorical()
    for t in range(2):
        at = f.view(N, 3, 2)[..., t]
        blocks = likelihood.curvature(y, f).view(N, 3, 2, 3, 2)
        assert_close(blocks[:, :, t, :, t], single.curvature(y[:, t : t + 1], at))
        assert not blocks[:, :, t, :, 1 - t].any()


@pytest.mark.parametrize("likelihood", [Bernoulli(), Categorical(), Poisson(), HeteroscedasticGaussian(), Gaussian()])
@pytest.mark.parametrize("size", [-80.0, 40.0])
def test_saturated_outputs_stay_finite_in_float32(likelihood, size):
    f = torch.tensor([[size, 0.0]])
    target = torch.zeros(1, 2 // likelihood.site_size(2))
    y = likelihood.validate(target.long() if isinstance(likelihood, Categorical) else target, 2)
    E = likelihood.expand(y, f)
    assert torch.isfinite(E.r).all()
    assert torch.isfinite(E.R.values).all()
    f.requires_grad_()
    likelihood.expand(y, f).R.values.sum().backward() if not isinstance(likelihood, Gaussian) else f.sum().backward()
    assert torch.isfinite(f.grad).all()


def test_an_indefinite_hessian_gives_way_to_the_fisher_information_and_says_so(float64):
    likelihood, f = StudentT(), torch.zeros(3, 2)
    y = torch.full((3, 2), 8.0)  # far in the tails, where log p is convex
    likelihood.num_fisher_samples = 4000
    with pytest.warns(UserWarning, match="Fisher information"):
        F = likelihood.curvature(y, f)
    assert_close(F, torch.eye(2).expand(3, 2, 2) * 5 / 7, rtol=0.1, atol=0.05)  # (ν + 1)/(ν + 3)


@pytest.mark.parametrize("observation", [o for o in OBSERVATIONS if o.name != "own"], ids=lambda o: o.name)
def test_samples_have_the_moments(observation, float64):
    likelihood, _, f = build(observation)
    S = 20000
    y = likelihood.sample(f.expand(S, *f.shape), torch.Generator().manual_seed(0))
    mean, variance = likelihood.moments(f)
    if isinstance(likelihood, Categorical):
        K = likelihood.site_size(f.shape[-1])
        y = torch.nn.functional.one_hot(y, K).mT.flatten(-2)
    y = y.to(f)
    assert ((y.mean(0) - mean).abs() <= 5 * (variance / S).sqrt()).all()
    spread = (y - mean).square()
    assert ((spread.mean(0) - variance).abs() <= 5 * spread.std(0) / S**0.5).all()


def test_hyperparameters_of_ones_own_likelihood_are_not_tuned_with_half_a_gradient(float64):
    likelihood, y, f = Scaled(), torch.randn(3, 2), torch.randn(3, 2)
    with pytest.raises(NotImplementedError, match="not differentiable in its hyperparameters"):
        likelihood.curvature(y, f)
    truth = 2 * torch.eye(2).expand(3, 2, 2)
    with torch.no_grad():
        assert_close(likelihood.curvature(y, f), truth)
    assert_close(likelihood.requires_grad_(False).curvature(y, f), truth)
