"""What must hold for any network, likelihood and data."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observations import OBSERVATIONS
from torch import nn
from torch.testing import assert_close

import ntkgp

FEW = settings(max_examples=20, deadline=None, derandomize=True)
METHODS = ("function", "full", "diag", "kron")


def problem(seed, observation, n, width):
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, observation.outputs))
        x, y = torch.randn(n, 2), observation.targets(n, observation.outputs)
        return net, x, y, torch.randn(4, 2), observation.make().double()
    finally:
        torch.set_default_dtype(default)


CASES = {
    "seed": st.integers(0, 999),
    "observation": st.sampled_from(OBSERVATIONS),
    "n": st.integers(1, 7),
    "width": st.integers(1, 5),
    "precision": st.floats(0.01, 100),
}


def spectrum(covariance):
    return torch.linalg.eigvalsh(covariance)


@FEW
@given(**CASES)
def test_data_only_reduce_variance_and_never_below_zero(seed, observation, n, width, precision):
    net, x, y, x_new, likelihood = problem(seed, observation, n, width)
    lin = ntkgp.Linearization(net, example=x)
    prior = ntkgp.priors.Isotropic(lin, precision)
    before = ntkgp.NTKKernel(lin, prior).blocks(x_new).detach()
    scale = before.diagonal(dim1=1, dim2=2).max()
    for method in METHODS:
        after = ntkgp.fit(lin, (x, y), likelihood, method, prior).latent(x_new).covariance_matrix
        assert spectrum(after).min() >= -1e-12 * scale
        assert spectrum(before - after).min() >= -1e-9 * scale


@FEW
@given(**CASES)
def test_data_without_weight_are_no_data(seed, observation, n, width, precision):
    net, x, y, x_new, likelihood = problem(seed, observation, n, width)
    lin = ntkgp.Linearization(net, example=x)
    prior = ntkgp.priors.Isotropic(lin, precision)
    before = ntkgp.NTKKernel(lin, prior).blocks(x_new).detach()
    for method in METHODS:
        post = ntkgp.fit(lin, (x, y), likelihood, method, prior, weights=torch.zeros(n))
        assert_close(post.latent(x_new).covariance_matrix, before, rtol=1e-9, atol=1e-12)
        assert abs(post.log_evidence().item()) < 1e-9  # nothing was observed: log 1


@FEW
@given(**CASES)
def test_the_linear_mode_has_the_largest_evidence_term(seed, observation, n, width, precision):
    net, x, y, _, likelihood = problem(seed, observation, n, width)
    lin = ntkgp.Linearization(net, example=x)
    post = ntkgp.fit(lin, (x, y), likelihood, "full", ntkgp.priors.Isotropic(lin, precision))
    assert post.log_evidence("linear_mode") >= post.log_evidence("map") - 1e-9
    mode = post.linear_mode().delta
    for _ in range(5):
        nearby = post._log_joint(mode + 0.01 * torch.randn_like(mode))
        assert nearby <= post._log_joint(mode) + 1e-9


@FEW
@given(**CASES, order=st.randoms(use_true_random=False))
def test_the_order_of_the_data_does_not_matter(seed, observation, n, width, precision, order):
    net, x, y, x_new, likelihood = problem(seed, observation, n, width)
    lin = ntkgp.Linearization(net, example=x)
    prior = ntkgp.priors.Isotropic(lin, precision)
    index = list(range(n))
    order.shuffle(index)
    for method in METHODS:
        a = ntkgp.fit(lin, (x, y), likelihood, method, prior)
        b = ntkgp.fit(lin, (x[index], y[index]), likelihood, method, prior)
        assert_close(a.latent(x_new).covariance_matrix, b.latent(x_new).covariance_matrix, rtol=1e-8, atol=1e-11)
        assert_close(a.log_evidence(), b.log_evidence(), rtol=1e-8, atol=1e-9)
