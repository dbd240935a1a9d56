"""The user's network stays as it was, and what is linearised stays as it was too."""

import copy
import warnings

import pytest
import torch
from cases import BY_NAME
from torch import nn
from torch.testing import assert_close

from ntkgp import Linearization


def _state(net):
    return {
        "training": [m.training for m in net.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in net.modules()],
        "requires_grad": [p.requires_grad for p in net.parameters()],
        "grad": [p.grad is None for p in net.parameters()],
        "switches": (
            torch.backends.mkldnn.enabled,
            torch.backends.mha.get_fastpath_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.is_grad_enabled(),
        ),
    }


@pytest.mark.parametrize("name", ["mlp", "resnet20", "transformer", "lstm", "norms"])
@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_the_network_or_of_torch_is_changed(name, training):
    net, x = BY_NAME[name].build()
    net.train(training)
    next(net.parameters()).requires_grad_(False)
    before, values = _state(net), copy.deepcopy(net.state_dict())
    lin = Linearization(net, example=x)
    lin.features(x)
    lin.vjp(x, torch.ones(x.shape[0], lin.num_outputs, dtype=torch.float64))
    lin.jvp(x, lin.theta)
    assert _state(net) == before
    assert all(torch.equal(value, net.state_dict()[key]) for key, value in values.items())


def test_training_the_network_further_does_not_move_the_linearisation(float64):
    net, x = BY_NAME["resnet20"].build()
    lin = Linearization(net, example=x)
    f, J = lin(x), lin.features(x).jacobian(lin.layout)
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(x).square().sum().backward()
    optimizer.step()
    assert not torch.allclose(net.eval()(x), f)
    assert_close(lin(x), f, rtol=0, atol=0)
    assert_close(lin.features(x).jacobian(lin.layout), J, rtol=0, atol=0)
    again, anew = lin.again(net), Linearization(net, example=x)
    assert_close(again(x), anew(x), rtol=0, atol=0)
    assert_close(again.features(x).jacobian(lin.layout), anew.jacobian(x), rtol=1e-9, atol=1e-12)
    assert_close(lin(x), f, rtol=0, atol=0)
    with pytest.raises(ValueError, match="it is another network"):
        Linearization(nn.Linear(3, 2)).again(nn.Linear(4, 2))


def test_a_network_in_training_mode_is_linearised_in_evaluation_mode(float64):
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 2)).train()
    x = torch.randn(5, 3)
    assert_close(Linearization(net)(x), copy.deepcopy(net).eval()(x).detach())


def test_networks_with_derived_tensors_as_attributes_can_be_copied(float64):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old weight norm is deprecated, and widely used
        net = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2)), nn.Tanh())
    x = torch.randn(4, 3)
    net(x)
    lin = Linearization(net, example=x)
    assert_close(lin.features(x).jacobian(lin.layout), lin.jacobian(x))


def test_a_layer_compiled_inside_a_network_runs_eagerly(float64):
    net = nn.Sequential(torch.compile(nn.Linear(3, 4), backend="eager"), nn.Tanh(), nn.Linear(4, 2))
    net[2].compile(backend="eager")
    lin, x = Linearization(net, parameters=["0._orig_mod.weight", "2"]), torch.randn(4, 3)
    assert lin.layout.names == ("0.weight", "2.weight", "2.bias")
    assert_close(lin.features(x).jacobian(lin.layout), lin.jacobian(x))
