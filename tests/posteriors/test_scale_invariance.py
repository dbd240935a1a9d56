"""Weights before a normalisation may be scaled by any number: the network does not change, nor should its posterior."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import ntkgp

NETWORKS = {
    "batch norm": lambda: (
        nn.Sequential(
            *(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh()),
            nn.Linear(6, 1),
        ),
        [(0, 1), (3, 4)],
    ),
    "layer norm": lambda: (
        nn.Sequential(nn.Linear(2, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)),
        [(0, 1)],
    ),
}


def trained(name):
    torch.manual_seed(1)
    net, normalised = NETWORKS[name]()
    x = torch.randn(60, 2)
    y = torch.sin(2 * x[:, :1]) + 0.1 * torch.randn(60, 1)
    optimizer = torch.optim.Adam(net.parameters(), 0.02, weight_decay=1e-3)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return net.eval(), normalised, x, y


def scaled(net, normalised, k):
    """Scale the weights before every norm, with its running mean by k, running variance and eps by k²."""
    net = deepcopy(net)
    for layer, norm in normalised:
        with torch.no_grad():
            net[layer].weight *= k
            net[layer].bias *= k
            if isinstance(net[norm], nn.BatchNorm1d):
                net[norm].running_mean *= k
                net[norm].running_var *= k * k
        net[norm].eps *= k * k
    return net


def predicted(net, x, y, by):
    lin = ntkgp.Linearization(net, example=x)
    prior = ntkgp.priors.Grouped(lin, by=by)
    post = ntkgp.fit(lin, (x, y), ntkgp.likelihoods.Gaussian(0.1).double(), "function", prior).tune().refine()
    q = post.latent(torch.linspace(-3, 3, 14).view(7, 2))
    return torch.cat([q.mean.flatten(), q.variance.flatten()])


@pytest.mark.filterwarnings("ignore:the mode of the linear model gains")
@pytest.mark.parametrize("name", NETWORKS)
def test_a_precision_for_each_normalised_group_keeps_the_predictive(name, float64):
    net, normalised, x, y = trained(name)
    before = predicted(net, x, y, "normalized")
    one = {"all": [parameter for parameter, _ in net.named_parameters()]}
    for k in (0.1, 10.0):
        other = scaled(net, normalised, k)
        assert_close(other(x), net(x), rtol=1e-10, atol=1e-12)
        assert_close(predicted(other, x, y, "normalized"), before, rtol=1e-6, atol=1e-6 * before.abs().max().item())
        moved = (predicted(other, x, y, one) - predicted(net, x, y, one)).abs().max()
        assert moved > 1e-3 * before.abs().max()
