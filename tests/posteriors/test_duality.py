"""The two spaces are one posterior, and both are the dense formulas."""

import pytest
import torch
from problems import Problem
from torch.testing import assert_close

import ntkgp

LIKELIHOODS = ["gaussian", "noise by output", "bernoulli", "categorical", "pixels", "poisson", "heteroscedastic", "own"]
LIKELIHOODS += ["tempered labels", "tempered pixels"]
TIGHT = {"rtol": 1e-8, "atol": 1e-10}


def both(problem, refined):
    function, full = problem.fit("function"), problem.fit("full")
    return (function.refine(), full.refine()) if refined else (function, full)


@pytest.mark.parametrize("refined", [False, True], ids=["fitted", "refined"])
@pytest.mark.parametrize("prior", ["isotropic", "grouped"])
@pytest.mark.parametrize("network", ["mlp", "cnn"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_function_space_and_weight_space_agree(likelihood, network, prior, refined, float64):
    problem = Problem(network, likelihood, prior)
    function, full = both(problem, refined)
    a, b = function.latent(problem.x_new), full.latent(problem.x_new)
    assert_close(a.mean, b.mean, **TIGHT)
    assert_close(a.covariance_matrix, b.covariance_matrix, **TIGHT)
    a, b = function.latent(problem.x_new, joint=True), full.latent(problem.x_new, joint=True)
    assert_close(a.covariance_matrix, b.covariance_matrix, **TIGHT)
    for at in ("map", "linear_mode"):
        assert_close(function.log_evidence(at), full.log_evidence(at), **TIGHT)
    assert_close(
        function.log_evidence(curvature_at="linear_mode"), full.log_evidence(curvature_at="linear_mode"), **TIGHT
    )


@pytest.mark.parametrize("prior", ["isotropic", "grouped", "diagonal"])
@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_samples_agree_under_shared_noise(likelihood, prior, float64):
    problem = Problem("mlp", likelihood, prior)
    function, full = problem.fit("function"), problem.fit("full")
    L, R = function._factor()
    z, noise = torch.randn(4, problem.lin.num_params), torch.randn(4, len(L))
    data_part = problem.lin.vjp(problem.x, (R @ noise.mT).mT.unflatten(1, (8, -1)))
    w = torch.linalg.solve_triangular(full._factor(), (z + full._whiten(data_part)).mT, upper=False).mT
    assert_close(function._from_noise(z, noise), full._from_noise(w), **TIGHT)


@pytest.mark.parametrize("prior", ["isotropic", "grouped", "around the map", "diagonal"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_function_space_is_the_dense_formula(likelihood, prior, float64):
    problem = Problem("cnn", likelihood, prior)
    posterior = problem.fit("function")
    J, f, J_new, f_new = problem.dense()
    Lambda = posterior.likelihood.curvature(problem.fit("function").model.data.y, f)
    S0 = problem.make_prior().covariance().to_dense()
    precision = torch.einsum("ncp,ncd,ndq->pq", J, Lambda, J) + torch.linalg.inv(S0)
    found = posterior.latent(problem.x_new)
    assert_close(found.mean, f_new, **TIGHT)
    assert_close(found.covariance_matrix, J_new @ torch.linalg.inv(precision) @ J_new.mT, **TIGHT)
    theta, m0 = problem.lin.theta, problem.make_prior().mean
    penalty = (theta - m0) @ torch.linalg.solve(S0, theta - m0)
    y = posterior.model.data.y
    truth = posterior.likelihood.log_prob(y, f).sum() - penalty / 2 - torch.logdet(S0 @ precision) / 2
    assert_close(posterior.log_evidence("map"), truth, **TIGHT)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_linear_mode_is_stationary(likelihood, float64):
    problem = Problem("mlp", likelihood, "grouped")
    J, f, _, _ = problem.dense()
    S0 = problem.make_prior().covariance().to_dense()
    for method in ("function", "full", "kron", "diag", "low_rank"):
        posterior = problem.fit(method, rank=10) if method == "low_rank" else problem.fit(method)
        mode = posterior.linear_mode()
        moved = f + J @ mode.delta
        r = posterior.likelihood.residual(posterior.model.data.y, moved)
        theta = problem.lin.theta + mode.delta
        gradient = torch.einsum("ncp,nc->p", J, r) - torch.linalg.solve(S0, theta - problem.make_prior().mean)
        assert mode.certificate.converged
        assert gradient.abs().max() < 1e-7, method
        assert mode.certificate.gradient_norm < 1e-7


def test_the_refined_posterior_has_its_own_hyperparameters(float64):
    problem = Problem()
    posterior = problem.fit("function")
    refined = posterior.refine()
    refined.prior.precision = 100.0
    assert not torch.equal(posterior.prior.precision, refined.prior.precision)


def test_float32_stays_close_to_float64():
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        exact = Problem("cnn", "categorical", n=12)
        truth = exact.fit("function").latent(exact.x_new)
        torch.set_default_dtype(torch.float32)
        lin = exact.lin.float()
        prior = ntkgp.priors.Grouped(lin, precision=torch.linspace(0.5, 2.0, len(lin.groups)), mean=0.1)
        for method in ("function", "full"):
            post = ntkgp.fit(lin, (exact.x.float(), exact.y), "categorical", method, prior)
            found = post.latent(exact.x_new.float())
            assert found.mean.dtype == torch.float32
            assert_close(found.covariance_matrix.double(), truth.covariance_matrix, rtol=1e-3, atol=1e-4)
    finally:
        torch.set_default_dtype(default)
