"""A prior in the units of the data: what the parameters are measured in does not matter."""

import pytest
import torch
from problems import Problem
from torch import nn
from torch.testing import assert_close

import ntkgp


class Rescaled(nn.Module):
    """A linear layer whose weights are stored in units of their own."""

    def __init__(self, layer, units):
        super().__init__()
        self.weight, self.bias = nn.Parameter(layer.weight.detach() / units), nn.Parameter(layer.bias.detach().clone())
        self.register_buffer("units", units)

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.units, self.bias)


def networks():
    torch.manual_seed(0)
    first, last = nn.Linear(3, 5), nn.Linear(5, 2)
    plain = nn.Sequential(first, nn.Tanh(), last)
    return plain, nn.Sequential(Rescaled(first, torch.rand(5, 3) * 10 + 0.1), nn.Tanh(), last)


def test_features_have_unit_curvature_and_the_diagonal_is_that_of_the_ggn(float64):
    problem = Problem("mlp", "categorical")
    post = ntkgp.fit(problem.lin, (problem.x, problem.y), method="full", prior="g_prior", tune=False)
    J, f, _, _ = problem.dense()
    Lambda = post.likelihood.curvature(post.model.data.y, f)
    h = torch.einsum("ncp,ncd,ndp->p", J, Lambda, J)
    assert_close(post.prior.scale.reciprocal(), h.clamp(min=1e-10 * h.max().item()), rtol=1e-8, atol=0)
    assert_close(post.prior.covariance().to_dense(), torch.diag(post.prior.scale), rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", ["function", "full", "diag"])
def test_the_predictive_does_not_depend_on_the_units_of_weights(method, float64):
    x, y, x_new = torch.randn(30, 3), torch.randint(0, 2, (30,)), torch.randn(6, 3)
    found = []
    for net in networks():
        post = ntkgp.fit(net, (x, y), method=method, prior="g_prior", tune=False)
        post.prior.precision = 0.7
        found.append((post.latent(x_new).covariance_matrix, post._log_det()))
    assert_close(found[0][0], found[1][0], rtol=1e-8, atol=1e-12)
    assert_close(found[0][1], found[1][1], rtol=1e-8, atol=0)


def test_both_spaces_agree_and_tune_it(float64):
    problem = Problem("cnn", "gaussian", n=20).informed()
    fits = [
        ntkgp.fit(problem.lin, (problem.x, problem.y), problem.make_likelihood(), m, "g_prior", tune=False)
        for m in ("function", "full", "sampled")
    ]
    exact = fits[0].log_evidence("map")
    assert_close(fits[1].log_evidence("map"), exact, rtol=1e-8, atol=0)
    (gradient,) = torch.autograd.grad(exact, fits[0].prior.raw_precision)
    assert gradient.abs() > 1e-3
    by_sample = fits[2].effective_parameters_by_sample()
    assert abs(by_sample.mean() - fits[0].effective_parameters()) <= 5 * by_sample.std() / 4


def test_it_is_saved(float64, tmp_path):
    problem = Problem("mlp", "categorical")
    post = ntkgp.fit(problem.lin, (problem.x, problem.y), method="function", prior="g_prior", tune=False)
    post.save(tmp_path / "post")
    loaded = ntkgp.load(tmp_path / "post", problem.net)
    assert_close(loaded.prior.scale, post.prior.scale, rtol=0, atol=0)
    assert_close(loaded.latent(problem.x_new).covariance_matrix, post.latent(problem.x_new).covariance_matrix)


def test_a_diagonal_that_cannot_be_is_named(float64):
    lin = Problem().lin
    with pytest.raises(ValueError, match=rf"diagonal must have shape \({lin.num_params},\), but has \(3,\)"):
        ntkgp.priors.GPrior(lin, torch.ones(3))
    with pytest.raises(ValueError, match="positive somewhere"):
        ntkgp.priors.GPrior(lin, torch.zeros(lin.num_params))
