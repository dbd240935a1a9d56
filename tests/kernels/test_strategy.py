"""Inducing values of several outputs in GPyTorch's own variational models."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    DeltaVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
)
from problems import Problem
from torch import nn
from torch.testing import assert_close

import ntkgp
from ntkgp import likelihoods, priors
from ntkgp.posteriors import Inducing

JITTER = 1e-9
DISTRIBUTIONS = [
    CholeskyVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
]


class Model(gpytorch.models.ApproximateGP):
    def __init__(self, lin, prior, Z, q=CholeskyVariationalDistribution, outputs=None, input_shape=None, **options):
        self.C = lin.num_outputs
        M = len(Z) * self.C if outputs is None else len(Z)
        strategy = ntkgp.MultiOutputVariationalStrategy(
            self, Z, q(M), outputs, **({"jitter_val": JITTER, "learn_inducing_locations": False} | options)
        )
        super().__init__(strategy)
        self.mean_module = ntkgp.LinearizedMean(lin, prior, input_shape)
        self.covar_module = ntkgp.NTKKernel(lin, prior, input_shape)

    def forward(self, x):
        kind = MultitaskMultivariateNormal if self.C > 1 else MultivariateNormal
        return kind(self.mean_module(x), self.covar_module(x))


def problem(C=3, n=9):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, C))
    x, y, x_new = torch.randn(n, 2), torch.randn(n, C), torch.randn(4, 2)
    lin = ntkgp.Linearization(net, example=x)
    return lin, priors.Grouped(lin, precision=torch.tensor([0.5, 2.0]), mean=0.2), x, y, x_new


def as_gpytorch(y):
    return y.squeeze(-1) if y.shape[1] == 1 else y


@pytest.mark.parametrize("pairs", [False, True], ids=["all outputs", "pairs"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("q", DISTRIBUTIONS)
def test_it_is_the_dense_formula(q, training, pairs, float64):
    lin, prior, x, _, x_new = problem()
    Z, outputs = x[:4], torch.tensor([2, 0, 0, 1]) if pairs else None
    model = Model(lin, prior, Z, q, outputs)
    model.train(), model(x_new)  # what makes the distribution start at the prior
    with torch.no_grad():
        for p in model.variational_strategy._variational_distribution.parameters():
            p.add_(0.1 * torch.rand_like(p) if p.ndim == 1 else 0.05 * torch.eye(len(p)))
    model.train(training)
    found, v = model(x_new), model.variational_strategy.variational_distribution
    J, J_Z = lin.jacobian(x_new).flatten(0, 1), lin.jacobian(Z).flatten(0, 1)
    if pairs:
        J_Z = J_Z.unflatten(0, (4, 3))[torch.arange(4), outputs]
    S0 = prior.covariance().to_dense().detach()
    L = torch.linalg.cholesky(J_Z @ S0 @ J_Z.mT + JITTER * torch.eye(len(J_Z)))
    W = torch.linalg.solve(L, J_Z @ S0 @ J.mT).mT
    mean = lin(x_new) + (J @ (prior.mean - lin.theta) + W @ v.mean).view(4, 3)
    covariance = J @ S0 @ J.mT - W @ W.mT + W @ v.covariance_matrix @ W.mT
    assert isinstance(found, MultitaskMultivariateNormal)
    assert_close(found.mean, mean, rtol=1e-8, atol=1e-8)
    if training:  # what is between points is left out
        covariance = torch.block_diag(*(covariance[3 * n : 3 * n + 3, 3 * n : 3 * n + 3] for n in range(4)))
    assert_close(found.covariance_matrix, covariance, rtol=1e-7, atol=1e-7)


def test_batches_of_another_size_are_taken_one_after_the_other(float64):
    lin, prior, x, _, x_new = problem()
    model = Model(lin, prior, x[:4])
    model.eval()
    each, twice, alone = model(x_new.unsqueeze(1)), model(x_new.expand(2, 4, 2)), model(x_new)
    blocks = alone.covariance_matrix.unflatten(0, (4, 3)).unflatten(2, (4, 3))  # (n, C, n, C)
    truth = torch.stack([blocks[n, :, n] for n in range(4)])
    assert_close(each.covariance_matrix, truth, rtol=1e-8, atol=1e-10)
    assert_close(twice.covariance_matrix[1], alone.covariance_matrix, rtol=1e-8, atol=1e-10)


def test_a_point_mass_has_the_residual_covariance_alone(float64):
    lin, prior, x, _, x_new = problem()
    model = Model(lin, prior, x[:4], DeltaVariationalDistribution).eval()
    kernel = ntkgp.NTKKernel(lin, prior)
    K_ZZ, K_xZ = kernel.gram(x[:4]), kernel.gram(x_new, x[:4])
    left = kernel.gram(x_new) - K_xZ @ torch.linalg.solve(K_ZZ, K_xZ.mT)
    assert_close(model(x_new).covariance_matrix, left, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("C", [1, 3])
def test_a_natural_step_reaches_the_optimum_for_gaussian_noise(C, float64):
    lin, prior, x, y, x_new = problem(C)
    model, likelihood = Model(lin, prior, x, NaturalVariationalDistribution), likelihoods.Gaussian(0.3)
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(x))
    step = gpytorch.optim.NGD(model.variational_parameters(), num_data=len(x), lr=1.0)
    model.train()
    (-mll(model(x), as_gpytorch(y))).backward()
    step.step()
    exact = ntkgp.fit(lin, (x, y), likelihood, "function", prior)
    with torch.no_grad():
        assert_close(mll(model(x), as_gpytorch(y)) * len(x), exact.log_evidence(), rtol=1e-6, atol=0)
    model.eval()
    found, truth = model(x_new), exact.refine().latent(x_new, joint=True)
    assert isinstance(found, MultitaskMultivariateNormal) == (C > 1)
    assert_close(found.mean.view(4, C), truth.mean, rtol=1e-5, atol=1e-6)
    assert_close(found.covariance_matrix, truth.covariance_matrix, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pairs", [False, True], ids=["all outputs", "pairs"])
@pytest.mark.parametrize("observation", ["gaussian", "categorical", "bernoulli"])
def test_it_is_ours_for_the_same_q(observation, pairs, float64):
    p = Problem("mlp", observation)
    prior = p.make_prior()
    outputs = torch.tensor([0, 1, 2, 0]) if pairs else None
    ours = ntkgp.fit(
        p.lin,
        (p.x, p.y),
        p.make_likelihood(),
        "variational",
        prior,
        inducing=Inducing(p.x[:4], outputs),
        mean="linear",
        nugget=0.0,
    )
    model = Model(p.lin, prior, p.x[:4], outputs=outputs, jitter_val=0.0)
    q = model.variational_strategy._variational_distribution
    model.variational_strategy.variational_params_initialized.fill_(1)
    with torch.no_grad():
        q.variational_mean.copy_(ours.q.mean)
        q.chol_variational_covar.copy_(torch.linalg.cholesky(ours.q.covariance))
    model.eval()
    found, truth = model(p.x_new), ours.latent(p.x_new, joint=True)
    assert_close(found.mean, truth.mean, rtol=1e-8, atol=1e-9)
    assert_close(found.covariance_matrix, truth.covariance_matrix, rtol=1e-7, atol=1e-9)
    if observation != "categorical":  # both bounds are integrated exactly
        model.train()
        mll = gpytorch.mlls.VariationalELBO(p.make_likelihood(), model, num_data=8)
        y = ours.model.data.y
        assert_close(8 * mll(model(p.x), y), ours.log_evidence(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("observation", ["categorical", "bernoulli"])
def test_it_trains_with_the_variational_elbo_and_moves_inducing_points(observation, float64):
    p = Problem("cnn", observation, n=20).informed(1.5)
    rows, Z = p.x.flatten(1), p.x[:5].flatten(1)
    model = Model(p.lin, p.make_prior(), Z, input_shape=p.x.shape[1:], learn_inducing_locations=True)
    likelihood = p.make_likelihood()
    y = likelihood.validate(p.y, p.lin.num_outputs)
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=20)
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    model.train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    values = []
    for _ in range(30):
        adam.zero_grad()
        loss = -mll(model(rows), y)
        loss.backward()
        adam.step()
        values.append(-loss.item())
    assert sum(values[-5:]) / 5 > sum(values[:5]) / 5 + 0.1
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name


def test_gradients_to_inducing_points_pass_through_the_network(float64):
    lin, prior, x, y, _ = problem()
    model, likelihood = Model(lin, prior, x[:3], learn_inducing_locations=True), likelihoods.Gaussian(0.3)
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(x))
    model.train(), model(x)
    Z = model.variational_strategy.inducing_points

    def bound(points):
        with torch.no_grad():
            Z.copy_(points)
        return mll(model(x), y)

    start = Z.detach().clone()
    bound(start).backward()
    gradient, direction = Z.grad.clone(), torch.randn_like(start)
    with torch.no_grad():
        slope = (bound(start + 1e-5 * direction) - bound(start - 1e-5 * direction)) / 2e-5
    assert_close((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-8)


def test_what_does_not_fit_is_named(float64):
    lin, prior, x, _, _ = problem()
    q = CholeskyVariationalDistribution(4)
    with pytest.raises(ValueError, match="outputs must hold an integer for each of 4 inducing points"):
        ntkgp.MultiOutputVariationalStrategy(None, x[:4], q, outputs=torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"inducing_points must have shape \(m, D\), but has \(1, 4, 2\)"):
        ntkgp.MultiOutputVariationalStrategy(None, x[None, :4], q)
    model = Model(lin, prior, x[:4])
    model.variational_strategy._variational_distribution = q
    with pytest.raises(ValueError, match="must be over the 12 values of 4 inducing points, but is over 4"):
        model(x)
    model = Model(lin, prior, x[:1].expand(4, -1), jitter_val=0.0)
    with pytest.raises(torch.linalg.LinAlgError, match="is not positive definite with jitter_val"):
        model(x)
