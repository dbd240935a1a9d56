"""f, J v, Jᵀ u, J and its factored form, against plain autograd, on every network of the table."""

import copy

import pytest
import torch
from cases import BY_NAME, dense_jacobian, map_input, relative_error
from torch import nn
from torch.testing import assert_close

from ntkgp import Linearization


def test_every_way_to_the_jacobian_is_the_oracle_in_float64(case):
    net, x = case.build()
    lin = Linearization(net, case.parameters, example=x)
    J = dense_jacobian(net, x, lin.layout.names)
    N, C, P = J.shape
    assert (lin.num_outputs, lin.num_params) == (C, P)
    u, v = torch.randn(2, N, C, dtype=J.dtype), torch.randn(2, P, dtype=J.dtype)
    assert relative_error(lin.jacobian(x), J) < 1e-10
    assert relative_error(lin.features(x).jacobian(lin.layout), J) < 1e-10
    assert relative_error(lin.jvp(x, v), torch.einsum("ncp,sp->snc", J, v)) < 1e-10
    assert relative_error(lin.vjp(x, u), torch.einsum("ncp,snc->sp", J, u)) < 1e-10
    assert relative_error(lin.jvp(x, v[0]), J @ v[0]) < 1e-10
    assert relative_error(lin.vjp(x, u[0]), torch.einsum("ncp,nc->p", J, u[0])) < 1e-10
    f, moved = lin.value_and_jvp(x, v[1])
    assert relative_error(f, lin(x)) < 1e-10
    assert relative_error(moved, J @ v[1]) < 1e-10


def test_float32_features_stay_close_to_the_float64_oracle(case):
    net, x = case.build()
    J = dense_jacobian(net, x, Linearization(net, case.parameters, example=x).layout.names)
    net, x = case.build(torch.float32)
    lin = Linearization(net, case.parameters, example=x)
    F = lin.features(x)
    assert all(t.dtype == torch.float32 for t in F.tensors() if t.is_floating_point())
    assert relative_error(F.jacobian(lin.layout), J) < 1e-4


def test_the_rules_cover_every_parameter(case):
    net, x = case.build()
    lin = Linearization(net, case.parameters, example=x)
    covered = [analysis.fallback for analysis in lin._known.analyses.values()]
    assert covered == [tuple(sorted(case.fallback))] * len(covered)


def test_the_output_is_the_networks_own(case):
    net, x = case.build()
    f = net(**x) if isinstance(x, dict) else net(*x) if isinstance(x, tuple) else net(x)
    lin = Linearization(net, case.parameters)
    assert_close(lin(x), f.detach().reshape(f.shape[0], -1), rtol=1e-10, atol=1e-12)


def test_theta_lists_the_parameters_in_order(float64):
    net, x = BY_NAME["mlp"].build()
    lin = Linearization(net, parameters=["0.bias", "4"], example=x)
    assert lin.layout.names == ("0.bias", "4.weight", "4.bias")
    assert_close(lin.theta, torch.cat([net[0].bias, net[4].weight.flatten(), net[4].bias]).detach(), rtol=0, atol=0)
    assert lin.groups == {"0": ["0.bias"], "4": ["4.weight", "4.bias"]}


def test_a_linear_network_is_its_own_linearisation(float64):
    net, x = nn.Linear(3, 2), torch.randn(5, 3)
    lin, delta = Linearization(net), torch.randn(8)
    moved = copy.deepcopy(net)
    nn.utils.vector_to_parameters(lin.theta + delta, moved.parameters())
    assert_close(lin(x) + lin.jvp(x, delta), moved(x).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "lenet", "transformer", "lstm", "norms"])
def test_many_examples_are_captured_in_batches(name, monkeypatch):
    net, x = BY_NAME[name].build()
    x = torch.cat([x, x.flip(0), x])[:9]
    lin = Linearization(net, example=x)
    J = dense_jacobian(net, x, lin.layout.names)
    monkeypatch.setattr("ntkgp.linearization.linearization._CAPTURE_BYTES", 1)
    monkeypatch.setattr("ntkgp.linearization.linearization._PRODUCT_BYTES", 1)
    v, u = torch.randn(lin.num_params, dtype=J.dtype), torch.randn(J.shape[:2], dtype=J.dtype)
    assert relative_error(lin.features(x).jacobian(lin.layout), J) < 1e-10
    assert relative_error(lin.jvp(x, v), J @ v) < 1e-10
    assert relative_error(lin.vjp(x, u), torch.einsum("ncp,nc->p", J, u)) < 1e-10


def test_a_network_that_computes_large_batches_otherwise_is_still_exact(float64, monkeypatch):
    class TwoWays(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 2))

        def forward(self, x):
            return x @ self.w if len(x) != 3 else torch.stack([row @ self.w for row in x])

    net, x = TwoWays(), torch.randn(8, 3)
    lin = Linearization(net, example=x)
    monkeypatch.setattr(
        "ntkgp.linearization.linearization._CAPTURE_BYTES", 3 * 8 * lin._known.analyses[((3,),)].cotangents * 3
    )
    assert relative_error(lin.features(x).jacobian(lin.layout), dense_jacobian(net, x, ["w"])) < 1e-12
    assert relative_error(lin.features(x[:3]).jacobian(lin.layout), dense_jacobian(net, x[:3], ["w"])) < 1e-12


def test_selected_outputs_and_their_sums(float64):
    net, x = BY_NAME["lenet"].build()
    lin = Linearization(net, example=x)
    J, f = lin.jacobian(x), lin(x)
    W = torch.randn(2, 4)
    v, u = torch.randn(lin.num_params), torch.randn(3, 2)
    for outputs, matrix in [(2, torch.eye(4)[[2]]), ([3, 0], torch.eye(4)[[3, 0]]), ("sum", torch.ones(1, 4)), (W, W)]:
        some = lin.select(outputs)
        J_some = torch.einsum("kc,ncp->nkp", matrix, J)
        assert some.num_outputs == len(matrix)
        assert_close(some(x), f @ matrix.T)
        assert_close(some.features(x).jacobian(lin.layout), J_some)
        assert_close(some.jacobian(x), J_some)
        assert_close(some.jvp(x, v), J_some @ v)
        assert_close(some.vjp(x, u[:, : len(matrix)]), torch.einsum("nc,ncp->p", u[:, : len(matrix)], J_some))
    assert_close(lin.select(W).select(1).jacobian(x), torch.einsum("kc,ncp->nkp", W[1:], J))


def test_a_converted_linearisation_computes_in_the_new_dtype():
    net, x = BY_NAME["lenet"].build(torch.float32)
    lin = Linearization(net, example=x)
    double = lin.double()
    assert double.features(x.double()).like.dtype == torch.float64
    assert lin.dtype == torch.float32
    assert lin.float() is lin
    assert relative_error(lin.features(x).jacobian(lin.layout), double.jacobian(x.double())) < 1e-4


@pytest.mark.parametrize("name", ["mlp", "lenet", "norms", "transformer", "unet"])
def test_features_products_and_outputs_are_differentiable_in_the_inputs(name, float64):
    net, x = BY_NAME[name].build()
    net = nn.Sequential(net, nn.Flatten(), nn.Linear(net(x)[0].numel(), 2)) if name == "unet" else net
    lin = Linearization(net, example=x)
    x = x[:2].clone().requires_grad_(True)
    direction, step = torch.randn_like(x), 1e-5
    u, v = torch.randn(2, lin.num_outputs), torch.randn(lin.num_params)
    functions = {
        "f": lambda z: (lin(z) * u).sum(),
        "jvp": lambda z: (lin.jvp(z, v) * u).sum(),
        "vjp": lambda z: lin.vjp(z, u) @ v,
        "features": lambda z: (torch.cat([t.flatten() for t in lin.features(z).tensors()])).square().sum(),
    }
    for what, function in functions.items():
        (grad,) = torch.autograd.grad(function(x), x)
        with torch.no_grad():
            slope = (function(x + step * direction) - function(x - step * direction)) / (2 * step)
        assert_close((grad * direction).sum(), slope, rtol=1e-5, atol=1e-7, msg=lambda m: f"{what}: {m}")  # noqa: B023


def test_inputs_of_another_length_are_learnt_anew(float64):
    net, _ = BY_NAME["transformer"].build()
    lin = Linearization(net)
    for length in (2, 4, 3):
        x = torch.randn(3, length, 8)
        assert relative_error(lin.features(x).jacobian(lin.layout), dense_jacobian(net, x, lin.layout.names)) < 1e-10


def test_a_dict_and_a_tuple_reach_networks_that_take_them_whole(float64):
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(3, 2)

        def forward(self, batch):
            values = list(batch.values()) if isinstance(batch, dict) else list(batch)
            return self.w(values[0] + values[1])

    net, a, b = Whole(), torch.randn(4, 3), torch.randn(4, 3)
    for x in ({"a": a, "b": b}, (a, b), [a, b]):
        assert_close(Linearization(net)(x), net.w(a + b).detach())


def test_map_input_of_the_table_keeps_structure():
    assert map_input(lambda t: t + 1, {"a": torch.zeros(1)})["a"].item() == 1
