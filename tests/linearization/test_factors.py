"""What is computed from features and factors, on every network of the table."""

import torch
from cases import BY_NAME, dense_jacobian
from torch.testing import assert_close

import ntkgp
from ntkgp.linearization.inputs import batch_size


def test_products_of_features_are_those_of_the_jacobian(case):
    net, x = case.build()
    lin = ntkgp.Linearization(net, case.parameters, example=x)
    J = dense_jacobian(net, x, lin.layout.names)
    v = torch.randn(3, lin.num_params, dtype=torch.float64)
    parts = dict(zip(lin.layout.names, v.split(lin.layout.sizes, -1), strict=True))
    assert_close(lin.features(x).jvp(parts), torch.einsum("ncp,sp->snc", J, v), rtol=1e-8, atol=1e-10)


def test_factors_of_all_uses_add_up_to_the_jacobian(case):
    net, x = case.build()
    lin = ntkgp.Linearization(net, case.parameters, example=x)
    J, at = dense_jacobian(net, x, lin.layout.names), lin.layout.slices
    seen = 0
    for some, uses in lin.factors(x):
        n = some.stop - some.start
        for name, factors in uses.items():
            found = sum(factor.dense().expand(n, -1, -1) for factor in factors)
            assert_close(found, J[some, :, at[name]], rtol=1e-8, atol=1e-10)
        seen += n
    assert seen == batch_size(x)


def test_factors_of_combinations_are_those_of_their_gradients(case):
    net, x = case.build()
    lin = ntkgp.Linearization(net, case.parameters, example=x)
    J, at = dense_jacobian(net, x, lin.layout.names), lin.layout.slices
    u = torch.randn(2, *J.shape[:2], dtype=torch.float64)
    combined = torch.einsum("snc,ncp->nsp", u, J)
    for some, uses in lin.factors(x, u):
        n = some.stop - some.start
        for name, factors in uses.items():
            found = sum(factor.dense().expand(n, -1, -1) for factor in factors)
            assert_close(found, combined[some, :, at[name]], rtol=1e-8, atol=1e-9)


def test_a_restricted_linearisation_sees_some_parameters_only():
    net, x = BY_NAME["mlp"].build()
    lin = ntkgp.Linearization(net, example=x)
    last = lin.restrict(["4"])
    J = dense_jacobian(net, x, lin.layout.names)
    assert last.layout.names == ("4.weight", "4.bias")
    assert_close(last.jacobian(x), J[..., lin.layout.slices["4.weight"].start :])
    assert_close(last(x), lin(x))


def test_the_network_can_be_evaluated_at_other_weights():
    net, x = BY_NAME["lenet"].build()
    lin = ntkgp.Linearization(net, example=x)
    theta = lin.theta + 0.1
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1)
    assert_close(lin(x, theta), net(x).detach())


def test_batches_of_combinations_leave_room_for_what_a_convolution_sees():
    net = torch.nn.Sequential(torch.nn.Conv2d(4, 1, 5, padding=2), torch.nn.Flatten())
    lin = ntkgp.Linearization(net, example=torch.randn(2, 4, 28, 28))
    (analysis,) = lin._known.analyses.values()
    assert analysis.windows == 28 * 28 * 4 * 25
    assert lin._capture_bytes(analysis, 1) == 4 * (analysis.windows + 2 * analysis.cotangents)
