"""Structured covariances against dense oracles."""

import pytest
import torch
from problems import PRIORS, Problem
from torch.testing import assert_close

import ntkgp
from ntkgp.posteriors import subnetworks

TIGHT = {"rtol": 1e-8, "atol": 1e-10}


def dense_ggn(problem, likelihood, y):
    J, f, J_new, _ = problem.dense()
    Lambda = likelihood.curvature(y, f)
    return torch.einsum("ncp,ncd,ndq->pq", J, Lambda, J), J_new, problem.make_prior().covariance().to_dense()


@pytest.mark.parametrize("prior", ["isotropic", "grouped", "diagonal"])
@pytest.mark.parametrize("likelihood", ["noise by output", "categorical", "pixels"])
@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_diag_is_the_inverse_of_the_diagonal(network, likelihood, prior, float64):
    problem = Problem(network, likelihood, prior)
    post = problem.fit("diag")
    H, J_new, S0 = dense_ggn(problem, post.likelihood, post.model.data.y)
    covariance = torch.diag(1 / (H.diagonal() + 1 / S0.diagonal()))
    assert_close(post.latent(problem.x_new).covariance_matrix, J_new @ covariance @ J_new.mT, **TIGHT)
    joint = J_new.flatten(0, 1) @ covariance @ J_new.flatten(0, 1).mT
    assert_close(post.latent(problem.x_new, joint=True).covariance_matrix, joint, **TIGHT)
    assert_close(post._log_det(), torch.log1p(H.diagonal() * S0.diagonal()).sum(), **TIGHT)


def kronecker_oracle(problem, post):
    """G ⊗ A + S₀⁻¹, layer by layer, from inputs and cotangents caught by plain hooks."""
    lin, y = problem.lin, post.model.data.y
    R = post.likelihood.curvature_root(y, lin(problem.x))
    caught, cotangents = {}, {}
    layers = {name: m for name, m in problem.net.named_modules() if hasattr(m, "weight")}
    handles = [
        m.register_forward_hook(lambda m, i, o, name=name: caught.update({name: (i[0].detach(), o)}))
        for name, m in layers.items()
    ]
    N, C = lin(problem.x).shape
    for k in range(R.shape[-1]):
        f = problem.net(problem.x).reshape(N, C)
        outputs = [caught[name][1] for name in layers]
        for name, g in zip(layers, torch.autograd.grad((f * R[:, :, k]).sum(), outputs), strict=True):
            cotangents.setdefault(name, []).append(g)
    for handle in handles:
        handle.remove()
    blocks = []
    for name, m in layers.items():
        a, g = caught[name][0], torch.stack(cotangents[name])  # (C, N, ...)
        if a.ndim == 4:
            a = torch.nn.functional.unfold(a, m.kernel_size).mT  # (N, T, d_in)
            g = g.flatten(3).mT  # (C, N, T, d_out)
        else:
            a, g = a.unsqueeze(1), g.unsqueeze(2)
        T = a.shape[1]
        A = torch.einsum("nti,ntj->ij", a, a) / (N * T)
        G = torch.einsum("cnto,cntp->op", g, g)
        blocks += [torch.kron(G, A), G]
    return torch.block_diag(*blocks)


@pytest.mark.parametrize("prior", ["isotropic", "grouped", "kronecker"])
@pytest.mark.parametrize("likelihood", ["gaussian", "noise by output", "categorical"])
@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_kron_is_the_inverse_of_kronecker_blocks(network, likelihood, prior, float64):
    problem = Problem(network, likelihood, "isotropic")
    if prior == "kronecker":

        def correlated(n):
            root = torch.randn(n, n)
            return root @ root.mT / n + torch.eye(n)

        weights = [
            (n, s) for n, s in zip(problem.lin.layout.names, problem.lin.layout.shapes, strict=True) if len(s) > 1
        ]
        factors = {name: (correlated(shape[0]), correlated(shape[1:].numel())) for name, shape in weights}
        prior_object = ntkgp.priors.Kronecker(problem.lin, 0.7, factors=factors)
    else:
        prior_object = PRIORS[prior](problem.lin)
    problem.make_prior = lambda: prior_object
    post = problem.fit("kron")
    H = kronecker_oracle(problem, post)
    S0 = prior_object.covariance().to_dense()
    covariance = torch.linalg.inv(H + torch.linalg.inv(S0))
    J_new = problem.dense()[2]
    assert_close(post.latent(problem.x_new).covariance_matrix, J_new @ covariance @ J_new.mT, **TIGHT)
    assert_close(post._log_det(), torch.logdet(S0 @ H + torch.eye(len(H))), **TIGHT)


def test_damping_adds_the_root_of_the_precision_to_each_factor(float64):
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2, bias=False)
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    lin = ntkgp.Linearization(net, example=x)
    post = ntkgp.fit(
        lin, (x, y), ntkgp.likelihoods.Gaussian(0.5), "kron", ntkgp.priors.Isotropic(lin, 4.0), damped=True
    )
    A, G = x.mT @ x / 6, 6 * torch.eye(2) / 0.5
    covariance = torch.linalg.inv(torch.kron(G + 2 * torch.eye(2), A + 2 * torch.eye(3)))
    x_new = torch.randn(4, 3)
    J = lin.jacobian(x_new)
    assert_close(post.latent(x_new).covariance_matrix, J @ covariance @ J.mT, **TIGHT)


@pytest.mark.parametrize("likelihood", ["noise by output", "categorical", "pixels"])
def test_sampled_kronecker_factors_have_the_exact_ones_as_their_mean(likelihood, float64):
    problem = Problem("cnn", likelihood)
    exact = problem.fit("kron")._statistics()
    draws = [problem.fit("kron", num_samples=4, seed=s)._statistics() for s in range(200)]
    for name, block in exact.items():
        G = torch.stack([draw[name].G for draw in draws])
        error = G.std(0) / 200**0.5
        assert ((G.mean(0) - block.G).abs() <= 5 * error + 1e-9).all()
        if block.A is not None:
            assert_close(draws[0][name].A, block.A)


def test_low_rank_keeps_the_leading_directions_and_the_prior_elsewhere(float64):
    problem = Problem("cnn", "categorical", "grouped")
    post = problem.fit("low_rank", rank=5)
    H, J_new, S0 = dense_ggn(problem, post.likelihood, post.model.data.y)
    values, vectors = torch.linalg.eigh(H)
    kept = (vectors[:, -5:] * values[-5:]) @ vectors[:, -5:].mT
    covariance = torch.linalg.inv(kept + torch.linalg.inv(S0))
    assert_close(post.latent(problem.x_new).covariance_matrix, J_new @ covariance @ J_new.mT, **TIGHT)
    assert_close(post._log_det(), torch.logdet(S0 @ kept + torch.eye(len(H))), **TIGHT)


def test_a_subnetwork_is_the_full_posterior_of_its_weights(float64):
    problem = Problem("mlp", "categorical", "diagonal")
    post = problem.fit("subnetwork", subnetwork=11)
    H, J_new, S0 = dense_ggn(problem, post.likelihood, post.model.data.y)
    at = post.index
    covariance = torch.linalg.inv(H[at][:, at] + torch.diag(1 / S0.diagonal()[at]))
    assert_close(post.latent(problem.x_new).covariance_matrix, J_new[..., at] @ covariance @ J_new[..., at].mT, **TIGHT)
    marginal = 1 / (H.diagonal() + 1 / S0.diagonal())
    assert set(at.tolist()) == set(marginal.topk(11).indices.tolist())


def test_subnetworks_can_be_chosen_by_name_at_random_and_by_swag(float64):
    problem = Problem()
    data = problem.x, problem.y
    named = ntkgp.fit(problem.lin, data, method="subnetwork", subnetwork=["2"], tune=False)
    assert named.lin.layout.names == ("2.weight", "2.bias")
    drawn = problem.fit("subnetwork", subnetwork=subnetworks.RandomWeights(5, seed=1))
    assert len(drawn.index.unique()) == 5
    variances = torch.arange(float(problem.lin.num_params))
    swag = problem.fit("subnetwork", subnetwork=subnetworks.SwagVariance(3, variances))
    assert_close(swag.index, torch.arange(problem.lin.num_params - 3, problem.lin.num_params))


def test_the_last_layer_is_the_one_that_makes_the_outputs(float64):
    problem = Problem()
    for structure in ("full", "kron", "diag"):
        post = ntkgp.fit(problem.lin, (problem.x, problem.y), method="last_layer", structure=structure, tune=False)
        assert post.lin.layout.names == ("4.weight", "4.bias")
    full = ntkgp.fit(problem.lin, (problem.x, problem.y), method="last_layer", tune=False)
    J, f, J_new, _ = problem.dense()
    at = slice(problem.lin.layout.slices["4.weight"].start, None)
    Lambda = full.likelihood.curvature(full.model.data.y, f)
    H = torch.einsum("ncp,ncd,ndq->pq", J[..., at], Lambda, J[..., at])
    truth = J_new[..., at] @ torch.linalg.inv(H + torch.eye(len(H))) @ J_new[..., at].mT
    assert_close(full.latent(problem.x_new).covariance_matrix, truth, **TIGHT)


@pytest.mark.parametrize("method", ["diag", "kron"])
def test_priors_that_break_the_structure_are_refused(method, float64):
    problem = Problem("cnn", "categorical")
    conv = ntkgp.priors.ConvFilterGP(problem.lin)
    with pytest.raises(ValueError, match="needs a prior"):
        ntkgp.fit(problem.lin, (problem.x, problem.y), method=method, prior=conv)


@pytest.mark.parametrize("method", ["function", "full", "low_rank"])
def test_any_prior_goes_with_the_unstructured_methods(method, float64):
    problem = Problem("cnn", "categorical")
    conv = ntkgp.priors.ConvFilterGP(problem.lin, variance=0.5, lengthscale=1.5)
    problem.make_prior = lambda: conv
    options = {"rank": 24} if method == "low_rank" else {}  # N C = 24: all of it
    post = problem.fit(method, **options)
    H, J_new, S0 = dense_ggn(problem, post.likelihood, post.model.data.y)
    covariance = torch.linalg.inv(H + torch.linalg.inv(S0))
    assert_close(post.latent(problem.x_new).covariance_matrix, J_new @ covariance @ J_new.mT, rtol=1e-7, atol=1e-9)
