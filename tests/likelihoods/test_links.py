"""Closed-form links against sampling, and their blindness to shifts."""

import torch
from torch.testing import assert_close

from ntkgp.likelihoods.links import bridge, probit_bernoulli, probit_categorical


def gaussian(K=4, scale=0.3):
    torch.manual_seed(0)
    root = scale * torch.randn(2, K, K)
    return torch.randn(2, K), root @ root.mT + 0.02 * torch.eye(K)


def sampled(mean, covariance):
    draws = torch.distributions.MultivariateNormal(mean, covariance).sample((40000,))
    return draws.softmax(-1).mean(0)


def test_probit_is_much_closer_to_sampling_than_the_mean_alone(float64):
    mean, covariance = gaussian(K=3, scale=0.8)
    truth = sampled(mean, covariance)
    error = (probit_categorical(mean, covariance) - truth).abs().max()
    assert error < 0.4 * (mean.softmax(-1) - truth).abs().max()


def test_two_classes_are_one_logit(float64):
    mean, covariance = gaussian(K=2)
    variance = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
    truth = probit_bernoulli(mean[:, 0] - mean[:, 1], variance)
    assert_close(probit_categorical(mean, covariance), torch.stack([truth, 1 - truth], -1), rtol=1e-12, atol=0)


def test_the_bridge_is_the_inverse_of_the_laplace_approximation_to_a_dirichlet(float64):
    alpha = torch.tensor([[0.7, 2.0, 5.0, 1.1]])
    K, inverse = 4, 1 / alpha
    mean = alpha.log() - alpha.log().mean(-1, keepdim=True)
    across = inverse[..., None] + inverse[..., None, :] - inverse.mean(-1)[..., None, None]
    assert_close(bridge(mean, torch.diag_embed(inverse) - across / K), alpha, rtol=1e-10, atol=0)


def test_a_shift_of_all_logits_does_not_count(float64):
    mean, covariance = gaussian()
    shifted, wider = mean + 7.0, covariance + 3.0  # along 1, and variance along 1
    assert_close(probit_categorical(shifted, wider), probit_categorical(mean, covariance), rtol=1e-9, atol=1e-12)
    assert_close(bridge(shifted, wider), bridge(mean, covariance), rtol=1e-9, atol=1e-12)


def test_more_variance_means_less_confidence(float64):
    mean, covariance = gaussian()
    confident, unsure = probit_categorical(mean, covariance), probit_categorical(mean, 30 * covariance)
    assert (unsure.max(-1).values < confident.max(-1).values).all()
    assert (bridge(mean, 30 * covariance).sum(-1) < bridge(mean, covariance).sum(-1)).all()


def test_the_bernoulli_probit_is_close_to_quadrature(float64):
    mean, variance = torch.tensor([-1.0, 0.5, 2.0]), torch.tensor([0.1, 1.0, 4.0])
    grid = torch.linspace(-8, 8, 4001)[:, None]
    weight = (-grid.square() / 2).exp() / (-grid.square() / 2).exp().sum()
    truth = (weight * (mean + variance.sqrt() * grid).sigmoid()).sum(0)
    assert_close(probit_bernoulli(mean, variance), truth, rtol=0, atol=0.02)
