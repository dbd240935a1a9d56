"""Posteriors of every network of the table, against dense Jacobians of the user's own network."""

import torch
from cases import dense_jacobian, relative_error

import ntkgp
from ntkgp.linearization.inputs import batch_size, take

NOISE = 0.3


def split(case):
    net, x = case.build()
    lin = ntkgp.Linearization(net, case.parameters, example=x)
    J = dense_jacobian(net, x, lin.layout.names)
    n = max(1, batch_size(x) - 1)
    y = torch.randn(n, lin.num_outputs, dtype=torch.float64)
    likelihood = ntkgp.likelihoods.Gaussian(torch.tensor(NOISE, dtype=torch.float64))
    data, x_new = (take(x, slice(n)), y), take(x, slice(batch_size(x) - 1, None))
    return lin, likelihood, data, x_new, J[:n].flatten(0, 1), J[-1]


def test_function_space_is_the_dense_formula(case):
    lin, likelihood, data, x_new, J, J_new = split(case)
    post = ntkgp.fit(lin, data, likelihood, "function", ntkgp.priors.Isotropic(lin, 2.0))
    K = torch.linalg.inv(J @ J.mT / 2 + NOISE * torch.eye(len(J), dtype=torch.float64))
    cross = J @ J_new.mT / 2
    truth = J_new @ J_new.mT / 2 - cross.mT @ K @ cross
    found = post.latent(x_new).covariance_matrix[0]
    assert relative_error(found, truth) < 1e-7
    r = data[1] - lin(data[0]) + (J @ lin.theta).view_as(data[1])
    mean = lin(x_new)[0] - J_new @ lin.theta + cross.mT @ K @ r.flatten()
    assert relative_error(post.refine().latent(x_new).mean[0], mean) < 1e-7


def test_diag_and_kron_know_every_parameter(case):
    lin, likelihood, data, x_new, J, J_new = split(case)
    prior = ntkgp.priors.Isotropic(lin, 2.0)
    diag = ntkgp.fit(lin, data, likelihood, "diag", prior)
    truth = (J_new / (J.square().sum(0) / NOISE + 2)) @ J_new.mT
    assert relative_error(diag.latent(x_new).covariance_matrix[0], truth) < 1e-8
    kron = ntkgp.fit(lin, data, likelihood, "kron", prior)
    found, before = kron.latent(x_new).covariance_matrix[0], J_new @ J_new.mT / 2
    assert torch.linalg.eigvalsh(before - found).min() > -1e-9 * before.diagonal().max()
    used = {name for name in lin.layout.names if J[:, lin.layout.slices[name]].any()}
    assert used <= {name for name, block in kron._statistics().items() if block.G.any()} <= set(lin.layout.names)
