"""Posteriors as BoTorch models, against the dense oracle and finite differences."""

import math
import subprocess
import sys
import warnings

import pytest
import torch
from problems import Problem
from torch import nn
from torch.testing import assert_close

import ntkgp

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # pyre_extensions and friends, on import
    from botorch.acquisition import LogExpectedImprovement, qLogExpectedImprovement
    from botorch.acquisition.objective import ScalarizedPosteriorTransform
    from botorch.models.model import Model
    from botorch.optim import optimize_acqf
    from botorch.sampling import SobolQMCNormalSampler

from ntkgp.interop import BotorchModel

METHODS = {
    "function": {},
    "variational": {"num_inducing": 6},
    "full": {},
    "kron": {},
    "diag": {},
    "low_rank": {"rank": 5},
    "sampled": {"num_samples": 4},
}
TIGHT = {"rtol": 1e-8, "atol": 1e-10}


def oracle(problem, post, X):  # (q, d) -> (q, C), (q C, q C)
    """Return mean and covariance in weight space, from dense Jacobians alone."""
    J, f, _, _ = problem.dense()
    Lambda = post.likelihood.curvature(post.model.data.y, f)
    H = torch.einsum("ncp,ncd,ndq->pq", J, Lambda, J) + problem.make_prior().covariance().to_dense().inverse()
    J_new = problem.lin.jacobian(X).flatten(0, 1)
    return problem.lin(X).detach(), (J_new @ H.inverse() @ J_new.mT).detach()


@pytest.mark.parametrize("batch", [(), (1,), (4,), (2, 3)])
@pytest.mark.parametrize("q", [1, 3])
def test_batches_of_joint_gaussians_are_those_of_the_dense_oracle(batch, q, float64):
    problem = Problem("mlp", "gaussian")
    post = problem.fit("function")
    model, X = BotorchModel(post), torch.randn(*batch, q, 3)
    found = model.posterior(X)
    assert isinstance(model, Model)
    assert model.num_outputs == 3
    assert found.mean.shape == found.variance.shape == (*batch, q, 3)
    covariance = found.distribution.covariance_matrix
    flat = zip(X.reshape(-1, q, 3), found.mean.reshape(-1, q, 3), covariance.reshape(-1, 3 * q, 3 * q), strict=True)
    for points, mean, cov in flat:
        expected, expected_cov = oracle(problem, post, points)
        assert_close(mean, expected, **TIGHT)
        assert_close(cov, expected_cov, **TIGHT)


@pytest.mark.parametrize("refined", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_derivatives_in_x_are_those_of_finite_differences(method, refined, float64):
    problem = Problem("mlp", "gaussian")
    post = problem.fit(method, **METHODS[method])
    model = BotorchModel(post.refine() if refined else post)

    def moments(X):
        found = model.posterior(X).distribution
        return found.mean, found.covariance_matrix

    X = torch.randn(2, 2, 3, requires_grad=True)
    slopes = torch.autograd.grad(sum(part.square().sum() for part in moments(X)), X)[0]
    assert slopes.abs().min() > 0
    assert torch.autograd.gradcheck(moments, X, eps=1e-6, atol=1e-7, rtol=1e-5)


def test_images_as_rows_have_derivatives_too(float64):
    problem = Problem("cnn", "categorical")
    model = BotorchModel(problem.fit("function"), input_shape=(1, 5, 5))
    X = problem.x_new[:2].reshape(1, 2, 25).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda X: model.posterior(X).variance, X, eps=1e-6, atol=1e-7, rtol=1e-5)


def test_hyperparameters_are_constants_and_learn_again_afterwards(float64):
    post = Problem("mlp", "gaussian").fit("function")
    learnt = {name: p.requires_grad for name, p in post.named_parameters()}
    X = torch.randn(2, 1, 3, requires_grad=True)
    BotorchModel(post).posterior(X).variance.sum().backward()
    assert any(learnt.values())
    assert {name: p.requires_grad for name, p in post.named_parameters()} == learnt
    assert all(p.grad is None for p in post.parameters())


def test_two_points_in_one_place_have_finite_derivatives(float64):
    post = Problem("mlp", "gaussian").fit("function")
    X = torch.randn(1, 1, 3).repeat(1, 2, 1).requires_grad_(True)
    found = BotorchModel(post).posterior(X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GPyTorch adds jitter, and says so
        found.rsample(torch.Size([8])).sum().backward()
    assert torch.isfinite(X.grad).all()


def test_outputs_are_selected_and_combined(float64):
    post = Problem("mlp", "gaussian").fit("full")
    model, X = BotorchModel(post), torch.randn(2, 3)
    whole = model.posterior(X).distribution
    C = whole.covariance_matrix.unflatten(0, (2, 3)).unflatten(2, (2, 3))  # (q, C, q, C)
    some = model.posterior(X, output_indices=[2, 0]).distribution
    assert_close(some.mean, whole.mean[:, [2, 0]], **TIGHT)
    picked = C[:, [2, 0]][:, :, :, [2, 0]]
    assert_close(some.covariance_matrix, picked.reshape(4, 4), **TIGHT)
    one = model.posterior(X, output_indices=[1]).distribution
    assert_close(one.covariance_matrix, C[:, 1, :, 1], **TIGHT)
    weights = torch.tensor([1.0, -2.0, 0.5])
    scalar = model.posterior(X, posterior_transform=ScalarizedPosteriorTransform(weights)).distribution
    assert_close(scalar.covariance_matrix, torch.einsum("c,ncmd,d->nm", weights, C, weights), **TIGHT)


def test_noise_is_added_on_request(float64):
    post = Problem("mlp", "gaussian").fit("full")
    model, X = BotorchModel(post), torch.randn(4, 2, 3)
    plain = model.posterior(X).variance
    assert_close(model.posterior(X, observation_noise=True).variance - plain, torch.full((4, 2, 3), 0.5), **TIGHT)
    given = torch.rand(4, 2, 3)
    assert_close(model.posterior(X, observation_noise=given).variance - plain, given, **TIGHT)


def test_bad_input_is_named(float64):
    model = BotorchModel(Problem("mlp", "categorical").fit("full"))
    with pytest.raises(ValueError, match="observation_noise is for Gaussian likelihoods, but this one is Categorical"):
        model.posterior(torch.randn(2, 3), observation_noise=True)
    with pytest.raises(ValueError, match=r"X must have shape \(..., q, d\), but has \(3,\)"):
        model.posterior(torch.randn(3))
    with pytest.raises(TypeError, match="posterior must be an ntkgp posterior, but is a Linear"):
        BotorchModel(nn.Linear(2, 1))


class Bump:
    """A small network on eight points of a bump over [−2, 2], its posterior, and log EI of it on a grid."""

    def __init__(self):
        self.x = torch.linspace(-2, 2, 8).unsqueeze(1)
        self.y = (-(self.x - 0.5).square()).exp()
        net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).double()
        lin = ntkgp.Linearization(net, example=self.x)
        likelihood = ntkgp.likelihoods.Gaussian(1e-2)
        prior = ntkgp.priors.Isotropic(lin, 0.3)
        self.post = ntkgp.fit(lin, (self.x, self.y), likelihood, "function", prior, tune=False).refine()
        self.best = self.y.max()
        self.grid = torch.linspace(-2, 2, 4001).unsqueeze(1)

    def log_ei(self, X):  # (n, 1) -> (n,)
        """Return log EI by the textbook formula, from the exact GP in dense linear algebra."""
        lin = self.post.lin
        J, J_new = lin.jacobian(self.x).squeeze(1), lin.jacobian(X).squeeze(1)
        K, K_cross = J @ J.mT / 0.3, J_new @ J.mT / 0.3
        prior_mean = lambda x, J: lin(x).squeeze(1) - J @ lin.theta  # noqa: E731
        right = torch.cat([K_cross.mT, self.y - prior_mean(self.x, J)[:, None]], 1)
        solve = torch.linalg.solve(K + 1e-2 * torch.eye(8), right)
        mean = prior_mean(X, J_new) + K_cross @ solve[:, -1]
        std = (J_new.square().sum(1) / 0.3 - (K_cross * solve[:, :-1].mT).sum(1)).sqrt()
        z = (mean - self.best) / std
        normal = torch.distributions.Normal(torch.tensor(0.0), torch.tensor(1.0))
        ei = std * (normal.log_prob(z).exp() + z * normal.cdf(z))
        return torch.where(z > -4, ei.log(), -math.inf).detach()  # further down it cancels


def test_analytic_expected_improvement_is_the_textbooks(float64):
    bump = Bump()
    X = torch.linspace(0, 1, 9).unsqueeze(1)
    found = LogExpectedImprovement(BotorchModel(bump.post), bump.best)(X.unsqueeze(1))
    assert torch.isfinite(bump.log_ei(X)).all()
    assert_close(found, bump.log_ei(X), rtol=1e-6, atol=1e-8)


def test_optimised_expected_improvement_ends_at_the_best_point_of_the_grid(float64):
    bump = Bump()
    truth = bump.log_ei(bump.grid)
    sampler = SobolQMCNormalSampler(torch.Size([512]), seed=0)
    acquisition = qLogExpectedImprovement(BotorchModel(bump.post), bump.best, sampler)
    bounds = torch.tensor([[-2.0], [2.0]])
    x, value = optimize_acqf(acquisition, bounds, q=1, num_restarts=3, raw_samples=16)
    best = bump.grid[truth.argmax()]
    assert_close(x[0], best, rtol=0, atol=0.02)
    assert abs(value - truth.max()) < math.log(1.1)


def test_two_points_are_found_together(float64):
    bump = Bump()
    sampler = SobolQMCNormalSampler(torch.Size([128]), seed=0)
    acquisition = qLogExpectedImprovement(BotorchModel(bump.post), bump.best, sampler)
    bounds = torch.tensor([[-2.0], [2.0]])
    x, pair = optimize_acqf(acquisition, bounds, q=2, num_restarts=2, raw_samples=16)
    _, single = optimize_acqf(acquisition, bounds, q=1, num_restarts=2, raw_samples=16)
    assert x.shape == (2, 1)
    assert pair > single


def test_botorch_is_imported_on_use_only():
    code = "import sys, ntkgp; print([m for m in ('botorch', 'matplotlib', 'sklearn.ensemble') if m in sys.modules])"
    command = [sys.executable, "-W", "ignore", "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"
