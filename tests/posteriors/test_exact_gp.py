"""A refined Gaussian posterior is GPyTorch's ExactGP with our mean and kernel."""

from contextlib import ExitStack

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from problems import Problem
from torch import nn
from torch.testing import assert_close

import ntkgp
from ntkgp.operators.tangent import TangentKernelLinearOperator


class ExactGP(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, lin, prior):
        super().__init__(x, y, likelihood)
        self.mean_module = ntkgp.LinearizedMean(lin, prior)
        self.covar_module = ntkgp.NTKKernel(lin, prior)
        self.outputs = lin.num_outputs

    def forward(self, x):
        mean, covariance = self.mean_module(x), self.covar_module(x)
        if self.outputs == 1:
            return MultivariateNormal(mean, covariance)
        return MultitaskMultivariateNormal(mean, covariance)


@pytest.mark.parametrize("method", ["function", "full"])
@pytest.mark.parametrize("C", [1, 3])
def test_the_refined_posterior_is_the_exact_gp(method, C, float64):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, C))
    x, y, x_new = torch.randn(9, 2), torch.randn(9, C), torch.randn(4, 2)
    lin = ntkgp.Linearization(net, example=x)
    prior = ntkgp.priors.Grouped(lin, precision=torch.tensor([0.5, 2.0]), mean=0.2)
    post = ntkgp.fit(lin, (x, y), ntkgp.likelihoods.Gaussian(0.3), method, prior)
    refined = post.refine()
    if C == 1:
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        likelihood.noise = 0.3
        y = y.squeeze(-1)
    else:
        likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(C, has_task_noise=False)
        likelihood.noise = 0.3
    model = ExactGP(x, y, likelihood, lin, prior)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(10000):
        evidence = mll(model(x), y) * y.numel()
        model.eval(), likelihood.eval()
        truth = model(x_new)
        found = refined.latent(x_new, joint=True)
        assert_close(found.mean.view(truth.mean.shape), truth.mean, rtol=1e-8, atol=1e-10)
        assert_close(found.covariance_matrix, truth.covariance_matrix, rtol=1e-8, atol=1e-10)
        assert_close(post.log_evidence(), evidence.view(()), rtol=1e-8, atol=0)
        assert_close(refined.log_evidence(), evidence.view(()), rtol=1e-8, atol=0)


def test_a_lazy_kernel_is_solved_by_the_conjugate_gradients_of_linear_operator_as_its_settings_say(
    float64, monkeypatch
):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    x, y, x_new = torch.randn(40, 2), torch.randn(40), torch.randn(4, 2)
    lin = ntkgp.Linearization(net, example=x)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 0.3

    def mean(memory_budget: int, **settings) -> torch.Tensor:
        model = ExactGP(x, y, likelihood, lin, ntkgp.priors.Isotropic(lin))
        model.covar_module = ntkgp.NTKKernel(lin, ntkgp.priors.Isotropic(lin), memory_budget=memory_budget)
        model.eval()
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for name, value in settings.items():
                stack.enter_context(getattr(gpytorch.settings, name)(value))
            return model(x_new).mean

    truth = mean(4 << 30, max_cholesky_size=10000)
    products = []
    matmul = TangentKernelLinearOperator._matmul
    monkeypatch.setattr(
        TangentKernelLinearOperator, "_matmul", lambda self, v: products.append(v.shape) or matmul(self, v)
    )
    found = mean(100, max_cholesky_size=1, eval_cg_tolerance=1e-5, max_cg_iterations=100)
    tight = len(products)
    assert_close(found, truth, rtol=0, atol=1e-4)
    products.clear()
    loose = mean(100, max_cholesky_size=1, eval_cg_tolerance=1.0, max_cg_iterations=100)
    assert 5 < len(products) < tight
    assert (loose - truth).abs().max() > (found - truth).abs().max()


def test_one_newton_step_is_exact_for_gaussian_noise(float64):
    mode = Problem("mlp", "gaussian").fit("function").linear_mode()
    assert mode.certificate.steps <= 2  # one to get there, one to see that nothing is left
    assert mode.certificate.decrement < 1e-20
