"""Variational Laplace against dense references: gradients, Fisher diagonal, and what the Hessian does instead."""

import math

import pytest
import torch
import torch.nn.functional as F
from observations import BY_NAME
from torch import nn
from torch.testing import assert_close

import ntkgp
from ntkgp.training import VariationalLaplace
from ntkgp.training.smoothness import piecewise_linear


def network(outputs=3, activation=nn.Softplus):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 3), activation(), nn.Linear(3, outputs)).to(torch.get_default_dtype())


def problem(observation="categorical", n=6, **options):
    found = BY_NAME[observation]
    net, likelihood = network(found.outputs), found.make().to(torch.get_default_dtype())
    vl = VariationalLaplace(net, likelihood, num_data=20, **options)
    with torch.no_grad():
        vl.log_sigma += 0.3 * torch.randn(len(vl.log_sigma))
    return vl, torch.randn(n, 2), found.targets(n, found.outputs)


def theta_of(vl):
    return vl.mean().detach().clone()


def log_likelihood(vl, theta, x, y):
    """Σ log p(y | x, θ) as a function of a flat vector."""
    f = vl.outputs(x, vl.layout.split(theta))
    return vl.likelihood.log_prob(vl.likelihood.validate(y, f.shape[1]), f).sum()


def dense_objective(vl, theta, log_sigma, x, y, labels):
    """Eq. 30 as it is written, every gradient by itself; labels are those that were drawn."""
    S, N, s2 = len(x), vl.num_data, vl.prior_std.square()
    variance = (2 * log_sigma).exp()
    g = torch.autograd.functional.jacobian(lambda t: log_likelihood(vl, t, x, labels), theta, create_graph=True)
    total = log_likelihood(vl, theta, x, y) / S
    for i in range(len(theta)):
        total = total - S / 2 * variance[i] * (g[i] / S) ** 2
        ratio = (variance[i] + theta[i] ** 2) / s2[i]
        total = total - vl.beta / (2 * N) * (ratio - 1 + (s2[i] / variance[i]).log())
    return -total


@pytest.mark.parametrize("observation", [name for name in BY_NAME if name != "own"])
def test_loss_and_gradients_are_those_of_the_dense_objective(observation, float64):
    vl, x, y = problem(observation, prior_std={"0": 0.7, "2.weight": 1.5, "2.bias": 0.4}, beta=0.3)
    loss = vl.loss(x, y, torch.Generator().manual_seed(5))
    loss.backward()
    labels = vl.likelihood.sample(vl.outputs(x).detach(), torch.Generator().manual_seed(5))
    theta, log_sigma = theta_of(vl).requires_grad_(), vl.log_sigma.detach().clone().requires_grad_()
    truth = dense_objective(vl, theta, log_sigma, x, y, labels)
    by_theta, by_sigma = torch.autograd.grad(truth, (theta, log_sigma))
    assert_close(loss, truth, rtol=1e-10, atol=1e-12)
    assert_close(vl.layout.join({name: p.grad for name, p in vl.weights().items()}), by_theta, rtol=1e-9, atol=1e-12)
    assert_close(vl.log_sigma.grad, by_sigma, rtol=1e-9, atol=1e-12)


def test_the_terms_add_up_to_the_loss(float64):
    vl, x, y = problem(beta=0.5)
    terms = vl.terms(x, y, torch.Generator().manual_seed(5))
    q = torch.distributions.Normal(theta_of(vl), vl.log_sigma.exp())
    kl = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, vl.prior_std)).sum()
    assert_close(terms.divergence, kl / 20)
    assert_close(terms.loss, terms.penalty - terms.log_prob + 0.5 * terms.divergence)
    assert terms.penalty > 0


@pytest.mark.parametrize("observation", ["gaussian", "heteroscedastic", "categorical", "bernoulli", "poisson"])
def test_squares_of_label_gradients_have_the_fisher_diagonal_for_their_mean(observation, float64):
    vl, x, y = problem(observation)
    lin = ntkgp.Linearization(vl.net, example=x)
    f, generator = lin(x), torch.Generator().manual_seed(0)
    y = vl.likelihood.validate(y, f.shape[1])
    J = lin.jacobian(x)
    fisher = torch.einsum("ncp,ncd,ndp->p", J, vl.likelihood.curvature(y, f), J)
    squares = torch.stack([vl.label_gradient(x, generator).detach().square() for _ in range(300)])
    error = squares.std(0) / len(squares) ** 0.5
    assert ((squares.mean(0) - fisher).abs() <= 5 * error).all()


class Quartic(nn.Module):
    """f(w) = w² for any input: with noise 1 and a target above w², log p is convex in w at the origin."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.1]))

    def forward(self, x):
        return self.w.square() + 0 * x


def sigma_slope(curvature, log_sigma, s=1.0):
    """∂L/∂σ², up to a factor, for a target of 3, where H = 2 (3 − w²) − 4 w² = 5.94 > 1/s²."""
    vl = VariationalLaplace(Quartic(), ntkgp.likelihoods.Gaussian(1.0, learn_noise=False), 1, s, curvature=curvature)
    with torch.no_grad():
        vl.log_sigma.fill_(log_sigma)
    slopes = []
    for seed in range(50 if curvature == "fisher" else 1):
        vl.zero_grad()
        vl.loss(torch.zeros(1, 1), torch.full((1, 1), 3.0), torch.Generator().manual_seed(seed)).backward()
        slopes.append(-vl.log_sigma.grad.item())
    return sum(slopes) / len(slopes)


def test_the_hessian_makes_variances_grow_without_bound_and_the_fisher_does_not(float64):
    stds = (0.1, 1.0, 10.0, 1e3, 1e6)
    hessian = [sigma_slope("hessian", math.log(std)) for std in stds]
    H = 2 * (3 - 0.01) - 4 * 0.01
    assert H > 1  # 1/s²: Eq. 24
    assert_close(torch.tensor(hessian), torch.tensor([1 - (1 - H) * std**2 for std in stds]).double() + 0.0)
    assert min(hessian) > 0  # ever upwards
    fisher = [sigma_slope("fisher", math.log(std)) for std in stds]
    assert fisher[0] > 0  # up from below the optimum 1/(1/s² + F), F = 4 w²
    assert max(fisher[2:]) < 0  # and down from above, so that it is bounded


def test_where_the_hessian_is_negative_its_optimum_is_that_of_laplace(float64):
    vl = VariationalLaplace(nn.Linear(1, 1, bias=False), "gaussian", 1, 2.0, curvature="hessian")
    x, y = torch.tensor([[1.5]]), torch.tensor([[0.3]])
    with torch.no_grad():
        vl.log_sigma.fill_(0.5 * math.log(1 / (1 / 4 + 1.5**2)))  # Eq. 23
    vl.loss(x, y).backward()
    assert_close(vl.log_sigma.grad, torch.zeros(1), atol=1e-12, rtol=0)


@pytest.mark.parametrize("batch", [50, 10])
def test_variances_come_to_rest_at_the_tempered_fisher(batch, float64):
    net, x = nn.Linear(2, 1, bias=False), torch.randn(50, 2)
    vl = VariationalLaplace(net, ntkgp.likelihoods.Gaussian(0.5, learn_noise=False), 50, prior_std=2.0, beta=0.3)
    fisher = x.square().sum(0) / 0.5
    with torch.no_grad():
        vl.log_sigma.copy_(-(fisher / 0.3 + 1 / 4).log() / 2)
    slopes = []
    for _ in range(100):
        for part in x.split(batch):
            loss = vl.loss(part, torch.zeros(len(part), 1))
            slopes.append(torch.autograd.grad(loss, vl.log_sigma)[0])
    slopes = torch.stack(slopes).view(100, -1, 2).mean(1)  # over an epoch, so that minibatches are no source of noise
    assert (slopes.mean(0).abs() <= 5 * slopes.std(0) / 10).all()
    assert (slopes.std(0) > 0).all()


class Functional(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.inner, self.function = nn.Linear(2, 3), function

    def forward(self, x):
        return self.function(self.inner(x))


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (F.relu, "relu"),
        (nn.ReLU(), "relu"),
        (lambda x: F.relu(x, inplace=True), "relu"),
        (F.leaky_relu, "leaky_relu"),
        (nn.Hardtanh(), "hardtanh"),
        (F.relu6, "relu6"),
        (nn.PReLU(), "prelu"),
        (nn.RReLU(), "rrelu"),
        (nn.Hardsigmoid(), "hardsigmoid"),
        (nn.Threshold(0.1, 0.0), "threshold"),
    ],
)
def test_piecewise_linear_activations_are_refused(function, named):
    vl = VariationalLaplace(Functional(function), "categorical", 4)
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 2, 0])
    before = theta_of(vl)
    with pytest.raises(ValueError, match=rf"{named}.*such as softplus.*activations=\"any\""):
        vl.loss(x, y)
    with pytest.raises(ValueError, match="softplus"):
        vl.fit((x, y), epochs=1)
    assert torch.equal(theta_of(vl), before)
    assert VariationalLaplace(Functional(function), "categorical", 4, activations="any").loss(x, y).isfinite()


def test_a_network_that_is_refused_keeps_its_statistics():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3))
    before = net[1].running_mean.clone()
    with pytest.raises(ValueError, match="softplus"):
        VariationalLaplace(net, "categorical", 4).fit((torch.randn(4, 2), torch.tensor([0, 1, 2, 0])), epochs=1)
    assert torch.equal(net[1].running_mean, before)
    assert all(module.training for module in net.modules())


@pytest.mark.parametrize("function", [F.softplus, F.gelu, F.silu, torch.tanh, F.elu, F.mish, torch.sigmoid])
def test_smooth_activations_are_not(function):
    assert piecewise_linear(Functional(function)(torch.randn(4, 2))) == []


def test_bad_input_is_named(float64):
    vl, x, y = problem()
    with pytest.raises(ValueError, match="curvature must be one of fisher, hessian, but is 'ggn'"):
        problem(curvature="ggn")
    with pytest.raises(ValueError, match="activations must be"):
        problem(activations="relu")
    with pytest.raises(ValueError, match="beta must be positive"):
        problem(beta=0.0)
    with pytest.raises(ValueError, match="log_sigma_rate must be positive"):
        problem(log_sigma_rate=-1.0)
    with pytest.raises(ValueError, match="prior_std must be positive"):
        problem(prior_std=-1.0)
    with pytest.raises(ValueError, match=r"every parameter once, but '2.weight' is named by nothing"):
        problem(prior_std={"0": 1.0})
    with pytest.raises(ValueError, match=r"'0.weight' is named by \['0', '0.weight'\]"):
        problem(prior_std={"0": 1.0, "0.weight": 1.0, "2": 1.0})
    with pytest.raises(TypeError, match="net must be"):
        VariationalLaplace("net")
    with pytest.raises(ValueError, match="nothing to train"):
        VariationalLaplace(network().requires_grad_(False))
    with pytest.raises(ValueError, match="likelihood must be one of"):
        VariationalLaplace(network(), "softmax")
    with pytest.raises(ValueError, match="num_data must be at least 1, but is 0"):
        VariationalLaplace(network(), num_data=0)
    with pytest.raises(ValueError, match="num_data is not known"):
        VariationalLaplace(network()).loss(x, y)
    with pytest.raises(ValueError, match="classes from 0 to 2"):
        vl.loss(x, y + 3)
    with pytest.raises(ValueError, match="each of 6 inputs, but has 5"):
        vl.loss(x, y[:5])
