"""Mean-field VI and MAP: their losses against expectations that are known."""

import networks as zoo
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import ntkgp
from ntkgp.training import MaximumAPosteriori, MeanFieldVI


def vi(net, noise="local", spread=0.5, **options):
    torch.manual_seed(0)
    noise_1 = ntkgp.likelihoods.Gaussian(1.0, learn_noise=False)
    found = MeanFieldVI(net.double(), noise_1, 10, noise=noise, **options)
    with torch.no_grad():
        found.log_sigma.copy_(torch.rand(len(found.log_sigma)).add(0.5).mul(spread).log())
    return found


@pytest.mark.parametrize("noise", ["weights", "local", "positions"])
def test_outputs_of_a_linear_layer_have_the_moments_of_q(noise, float64):
    objective, x = vi(nn.Linear(3, 2), noise), torch.randn(4, 3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        f = torch.stack([objective.sampled_outputs(x, generator) for _ in range(1000)])
        J = torch.stack([torch.cat([torch.kron(torch.eye(2), row), torch.eye(2)], 1) for row in x])
        truth = torch.einsum("ncp,p,ncp->nc", J, objective.variances(), J)
        error = (f.var(0) / len(f)).sqrt()
        assert ((f.mean(0) - objective.net(x)).abs() < 5 * error).all()
    assert_close(f.var(0) / truth, torch.ones(4, 2), rtol=0, atol=5 * (2 / 1000) ** 0.5)


@pytest.mark.parametrize("noise", ["weights", "local"])
def test_the_loss_has_the_bound_for_its_expectation(noise, float64):
    objective, x, y = vi(nn.Linear(3, 1), noise), torch.randn(10, 3), torch.randn(10, 1)
    exact = -objective.terms(x, y).beta * objective.divergence() / 10
    variance = x.square() @ objective.variances()[:3] + objective.variances()[3]
    square = (y - objective.net(x)).square().squeeze() + variance
    exact = exact - (square / 2).mean() - torch.tensor(2 * torch.pi).log() / 2
    losses = torch.stack([objective.loss(x, y).detach() for _ in range(400)])
    assert abs(losses.mean() + exact) < 5 * losses.std() / 400**0.5


def test_local_noise_has_less_variance(float64):
    x, y = torch.randn(10, 3), torch.randn(10, 1)
    spread = {}
    for noise in ("weights", "local"):
        objective = vi(nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 1)), noise)
        spread[noise] = torch.stack([objective.loss(x, y).detach() for _ in range(100)]).var()
    assert spread["local"] < spread["weights"] / 2


def test_layers_with_positions_or_several_uses_have_their_weights_drawn(float64):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.tokens = nn.Conv1d(2, 3, 2), nn.Linear(4, 4)
            self.twice, self.once = nn.Linear(12, 12), nn.Linear(12, 2)

        def forward(self, x):
            h = self.tokens(self.conv(x).sigmoid()).flatten(1)
            return self.once(self.twice(self.twice(h).tanh()))

    x = torch.randn(3, 2, 5)
    names = {}
    for noise in ("weights", "local", "positions"):
        objective = vi(Net(), noise)
        assert objective.sampled_outputs(x).shape == (3, 2)
        layers = {id(module): name for name, module in objective.net.named_modules()}
        names[noise] = sorted(layers[id(module)] for module in objective._noisy)
    assert names == {"weights": [], "local": ["once"], "positions": ["conv", "once", "tokens"]}


def test_tied_weights_are_drawn_once(float64):
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Softplus(), nn.Linear(3, 3, bias=False))
    net[2].weight = net[0].weight
    objective = vi(net)
    objective.sampled_outputs(torch.randn(2, 3))
    assert objective._noisy == {}


def test_gradients_reach_means_and_variances(float64):
    objective = vi(zoo.lenet(classes=1), "positions")
    objective.loss(torch.randn(3, 1, 16, 16), torch.randn(3, 1)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in objective.net.parameters())
    assert objective.log_sigma.grad.isfinite().all()
    assert (objective.log_sigma.grad != 0).float().mean() > 0.9


def test_the_look_at_a_pass_leaves_no_trace(float64):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).train()
    objective, x = vi(net), torch.randn(5, 3)
    before = net[1].running_mean.clone()
    objective._noisy = objective._noisy_layers(x)
    assert torch.equal(net[1].running_mean, before)
    assert all(module.training for module in net.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_the_maximum_a_posteriori_has_weight_decay(float64):
    torch.manual_seed(0)
    net, x, y = nn.Linear(3, 1).double(), torch.randn(10, 3), torch.randn(10, 1)
    noise = ntkgp.likelihoods.Gaussian(0.5, learn_noise=False)
    objective = MaximumAPosteriori(net, noise, num_data=10, prior_std=0.7, beta=0.3)
    decay = sum(p.square().sum() for p in net.parameters()) / (2 * 0.49) / 10
    truth = -noise.log_prob(y, net(x)).mean() + 0.3 * decay
    assert_close(objective.loss(x, y), truth)
    post = objective.posterior((x, y))
    assert isinstance(post, ntkgp.posteriors.DiagonalPosterior)
    assert_close(post.prior.precision, torch.tensor([1 / 0.49]))
    assert_close(post.predict(x, predictive="map").mean, net(x).detach())


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="noise must be one of local, positions, weights, but is 'flipout'"):
        MeanFieldVI(nn.Linear(2, 2), noise="flipout")
    with pytest.raises(ValueError, match="num_samples must be at least 1, but is 0"):
        MeanFieldVI(nn.Linear(2, 2), num_samples=0)
