"""The Gaussian variational refinement satisfies its own equations."""

import pytest
import torch
from problems import Problem
from torch.testing import assert_close

from ntkgp.posteriors.full import FullPosterior
from ntkgp.posteriors.function_space import FunctionSpacePosterior


def expectations(post, f, blocks, y):
    """E_q[r] and E_q[Λ] of scalar sites on a fine grid."""
    z = torch.linspace(-9, 9, 2001)
    w = (-z.square() / 2).exp()
    w = w / w.sum()
    std = blocks.diagonal(dim1=-2, dim2=-1).sqrt()
    at = f + z[:, None, None] * std
    r = torch.einsum("s,snc->nc", w, post.likelihood.residual(y, at))
    Lambda = torch.einsum("s,sncd->ncd", w, post.likelihood.curvature(y, at))
    return r, Lambda


@pytest.mark.parametrize("method", ["function", "full", "diag"])
@pytest.mark.parametrize("likelihood", ["bernoulli", "poisson"])
def test_mean_and_covariance_are_stationary(likelihood, method, float64):
    problem = Problem("mlp", likelihood, "grouped")
    post = problem.fit(method).refine("variational")
    assert post.certificate.converged
    J, f, J_new, f_new = problem.dense()
    q, y = post.latent(problem.x), post.model.data.y
    assert_close(q.mean, f + J @ post.shift, rtol=1e-8, atol=1e-9)
    r, Lambda = expectations(post, q.mean, q.covariance_matrix, y)
    S0 = post.prior.covariance().to_dense().detach()
    theta = problem.lin.theta + post.shift
    gradient = torch.einsum("ncp,nc->p", J, r) - torch.linalg.solve(S0, theta - post.prior.mean)
    assert gradient.abs().max() < 1e-6
    H = torch.einsum("ncp,ncd,ndq->pq", J, Lambda, J)
    if method == "diag":
        covariance = torch.diag(1 / (H.diagonal() + 1 / S0.diagonal()))
    else:
        covariance = torch.linalg.inv(H + torch.linalg.inv(S0))
    found = post.latent(problem.x_new)
    assert_close(found.covariance_matrix, J_new @ covariance @ J_new.mT, rtol=1e-6, atol=1e-8)
    assert_close(found.mean, f_new + J_new @ post.shift, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("method", ["function", "full"])
def test_for_gaussian_noise_it_is_the_exact_posterior(method, float64):
    problem = Problem("mlp", "gaussian")
    post = problem.fit(method)
    a, b = post.refine("laplace").latent(problem.x_new), post.refine("variational").latent(problem.x_new)
    assert_close(a.mean, b.mean, rtol=1e-7, atol=1e-8)
    assert_close(a.covariance_matrix, b.covariance_matrix, rtol=1e-7, atol=1e-8)


def test_the_two_spaces_agree_for_classes_too(float64):
    problem = Problem("mlp", "categorical")
    a, b = (problem.fit(method).refine("variational", num_samples=200) for method in ("function", "full"))
    assert a.certificate.converged
    assert_close(a.latent(problem.x_new).mean, b.latent(problem.x_new).mean, rtol=1e-5, atol=1e-6)
    assert_close(
        a.latent(problem.x_new).covariance_matrix, b.latent(problem.x_new).covariance_matrix, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("method", "owner", "work"),
    [("full", FullPosterior, "_collect"), ("function", FunctionSpacePosterior, "_assembled")],
)
def test_a_step_forms_its_matrix_once(method, owner, work, float64, monkeypatch):
    post = Problem("mlp", "poisson").fit(method)
    calls = []
    own = getattr(owner, work)
    monkeypatch.setattr(owner, work, lambda self: calls.append(self) or own(self))
    counts = []
    for steps in (2, 5):
        calls.clear()
        refined = post.refine("variational", max_steps=steps, tolerance=1e-15)
        refined.latent(Problem("mlp", "poisson").x_new)
        counts.append(len(calls))
    assert counts[1] - counts[0] == 3


def test_giving_up_is_told(float64):
    post = Problem("mlp", "poisson").fit("function").refine("variational", max_steps=1)
    assert not post.certificate.converged
    assert post.certificate.steps == 1


def test_an_unknown_refinement_is_named(float64):
    with pytest.raises(ValueError, match='method must be "laplace" or "variational", but is \'em\''):
        Problem().fit("function").refine("em")
