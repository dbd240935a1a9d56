"""GPyTorch's own test case for likelihoods, and what it does not ask."""

import unittest

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.test.base_likelihood_test_case import BaseLikelihoodTestCase
from torch.testing import assert_close

from ntkgp.likelihoods import Bernoulli, Categorical, Gaussian, Poisson

NO_BATCH = torch.Size()


class TestGaussian(BaseLikelihoodTestCase, unittest.TestCase):
    seed = 1

    def create_likelihood(self, **kwargs):
        return Gaussian(0.7)


class TestBernoulli(BaseLikelihoodTestCase, unittest.TestCase):
    seed = 1

    def create_likelihood(self, **kwargs):
        return Bernoulli()

    def _create_targets(self, batch_shape=NO_BATCH):
        return torch.distributions.Bernoulli(0.5).sample(torch.Size([*batch_shape, 5]))


class TestPoisson(BaseLikelihoodTestCase, unittest.TestCase):
    seed = 1

    def create_likelihood(self, **kwargs):
        return Poisson()

    def _create_marginal_input(self, batch_shape=NO_BATCH):
        q = super()._create_marginal_input(batch_shape)
        return gpytorch.distributions.MultivariateNormal(q.mean / 4, q.lazy_covariance_matrix / 100)

    def _create_targets(self, batch_shape=NO_BATCH):
        return torch.randint(0, 4, torch.Size([*batch_shape, 5])).float()

    def _test_marginal(self, batch_shape):  # a mixture without a name: samples of rates come first
        q = self._create_marginal_input(batch_shape)
        with gpytorch.settings.num_likelihood_samples(4000):
            rates = self.create_likelihood()(q).mean
        truth = (q.mean + q.variance / 2).exp()
        self.assertAllClose(rates.mean(0), truth, rtol=0.05, atol=0.0)


class TestCategorical(BaseLikelihoodTestCase, unittest.TestCase):
    seed = 1

    def create_likelihood(self, **kwargs):
        return Categorical()

    def _create_conditional_input(self, batch_shape=NO_BATCH):
        return torch.randn(*batch_shape, 5, 6)

    def _create_marginal_input(self, batch_shape=NO_BATCH):
        mat = torch.randn(*batch_shape, 30, 30) / 10
        covariance = mat @ mat.mT + 0.1 * torch.eye(30)
        return MultitaskMultivariateNormal(torch.randn(*batch_shape, 5, 6), covariance)

    def _create_targets(self, batch_shape=NO_BATCH):
        return torch.randint(0, 6, torch.Size([*batch_shape, 5]))

    def _test_conditional(self, batch_shape):
        output = self.create_likelihood()(self._create_conditional_input(batch_shape))
        assert isinstance(output, torch.distributions.Categorical)
        assert output.sample().shape == torch.Size([*batch_shape, 5])

    def _test_marginal(self, batch_shape):
        q = self._create_marginal_input(batch_shape)
        with gpytorch.settings.num_likelihood_samples(2000):
            probs = self.create_likelihood()(q).probs.mean(0)
        draws = q.rsample(torch.Size([4000])).softmax(-1)
        assert_close(probs, draws.mean(0), rtol=0, atol=0.03)


def joint(C=3):
    root = torch.randn(5 * C, 5 * C)
    return MultitaskMultivariateNormal(torch.randn(5, C), root @ root.mT / 10 + 0.1 * torch.eye(5 * C))


@pytest.mark.parametrize("training", [True, False])
def test_class_covariance_counts_in_training_too(training, float64):
    q, y = joint(), torch.tensor([0, 1, 2, 0, 1])
    likelihood = Categorical().train(training)
    with gpytorch.settings.num_likelihood_samples(20000):
        found = likelihood.expected_log_prob(y, q)
    draws = q.sample(torch.Size([20000])).log_softmax(-1)[:, torch.arange(5), y]
    assert ((found - draws.mean(0)).abs() <= 6 * draws.std(0) / 20000**0.5).all()


def test_as_many_points_as_classes_are_not_transposed(float64):
    f = torch.randn(3, 3)
    assert_close(Categorical()(f).probs, f.softmax(-1))


def test_expectations_of_scalar_sites_are_exact(float64):
    q, y = joint(), torch.randn(5, 3)
    likelihood = Gaussian(0.5).double()
    mean, variance = q.mean, q.variance
    truth = likelihood.log_prob(y, mean) - (variance / 0.5).sum(-1) / 2
    assert_close(likelihood.expected_log_prob(y, q), truth, rtol=1e-8, atol=1e-10)


def test_the_gaussian_marginal_adds_noise_in_the_right_order(float64):
    q = joint()
    total = Gaussian(torch.tensor([0.5, 1.0, 2.0])).double()(q)
    added = total.covariance_matrix - q.covariance_matrix
    assert_close(added, torch.diag(torch.tensor([0.5, 1.0, 2.0]).repeat(5)))
