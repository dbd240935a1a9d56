"""Shapes and algebra that must hold for any network, not only for those of the table."""

from itertools import pairwise

import torch
from cases import dense_jacobian, relative_error
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from ntkgp import Linearization, NTKKernel, priors

FEW = settings(max_examples=25, deadline=None, derandomize=True)
sizes = st.integers(1, 4)


def _double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@FEW
@given(n=sizes, widths=st.lists(sizes, min_size=2, max_size=4), bias=st.booleans(), seed=st.integers(0, 99))
def test_an_mlp_of_any_shape_has_the_oracles_gram(n, widths, bias, seed):
    torch.manual_seed(seed)
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b, bias=bias), nn.Tanh())]
    net, x = nn.Sequential(*layers).double(), _double(n, widths[0])
    lin = Linearization(net, example=x)
    J = dense_jacobian(net, x, lin.layout.names).flatten(0, 1)
    with torch.no_grad():
        K = NTKKernel(lin, priors.Isotropic(lin, 0.5)).gram(x)
    assert relative_error(K, 2 * J @ J.mT) < 1e-10
    assert_close(K, K.mT, rtol=1e-12, atol=1e-14)
    assert torch.linalg.eigvalsh(K).min() > -1e-10 * K.diagonal().max()


@FEW
@given(
    dims=st.integers(1, 3),
    channels=st.tuples(sizes, sizes),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    groups=st.integers(1, 2),
    transposed=st.booleans(),
    extra=st.integers(0, 1),
)
def test_a_convolution_of_any_kind_has_the_oracles_jacobian(
    dims, channels, kernel, stride, padding, dilation, groups, transposed, extra
):
    torch.manual_seed(0)
    assume(not transposed or extra < max(stride, dilation))
    kinds = {
        True: (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        False: (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    }
    options = {"output_padding": extra} if transposed else {}
    layer = kinds[transposed][dims - 1](
        groups * channels[0], groups * channels[1], kernel, stride, padding, groups=groups, dilation=dilation, **options
    )
    side = 5 if dims < 3 else 4
    length = (side - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1
    assume(length > 0 if transposed else side + 2 * padding >= dilation * (kernel - 1) + 1)
    x = _double(2, groups * channels[0], *[side] * dims)
    net = nn.Sequential(layer, nn.Flatten()).double()
    lin = Linearization(net, example=x).select(torch.randn(3, net(x).shape[1], dtype=torch.float64))
    assert lin._known.analyses[(x.shape[1:],)].fallback == ()
    assert relative_error(lin.features(x).jacobian(lin.layout), lin.jacobian(x)) < 1e-10


@FEW
@given(start=st.integers(0, 12), stop=st.integers(0, 12), step=st.integers(1, 3), n=st.integers(1, 4))
def test_any_slice_of_the_operator_is_that_of_the_matrix(start, stop, step, n):
    torch.manual_seed(0)
    assume(start < min(stop, 3 * n))
    net, x = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double(), _double(n, 2)
    lin = Linearization(net, example=x)
    K = NTKKernel(lin, priors.Isotropic(lin)).operator(x)
    index = slice(start, stop, step)
    assert_close(K[index, :].to_dense(), K.to_dense()[index])
    assert_close(K[index, index].to_dense(), K.to_dense()[index, index])


@FEW
@given(s=sizes, n=sizes, a=st.floats(-3, 3), seed=st.integers(0, 99))
def test_products_are_linear_and_adjoint(s, n, a, seed):
    torch.manual_seed(seed)
    net, x = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Softplus(), nn.Flatten()).double(), _double(n, 1, 5)
    lin = Linearization(net, example=x)
    v, w, u = _double(s, lin.num_params), _double(s, lin.num_params), _double(s, n, lin.num_outputs)
    assert_close(lin.jvp(x, a * v + w), a * lin.jvp(x, v) + lin.jvp(x, w))
    assert_close((lin.jvp(x, v) * u).sum((1, 2)), (v * lin.vjp(x, u)).sum(1))


@FEW
@given(
    names=st.permutations(["0.weight", "0.bias", "2.weight", "2.bias"]), cut=st.integers(1, 3), seed=st.integers(0, 99)
)
def test_any_partition_of_the_parameters_splits_the_kernel(names, cut, seed):
    torch.manual_seed(seed)
    net, x = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double(), _double(3, 2)
    lin = Linearization(net, example=x)
    prior = priors.Grouped(lin, by={"a": names[:cut], "b": names[cut:]}, precision=torch.tensor([0.5, 4.0]))
    J = lin.jacobian(x).flatten(0, 1)
    columns = {name: J[:, at] for name, at in lin.layout.slices.items()}
    K = (
        2 * sum(columns[n] @ columns[n].mT for n in names[:cut])
        + sum(columns[n] @ columns[n].mT for n in names[cut:]) / 4
    )
    assert_close(NTKKernel(lin, prior).gram(x).detach(), K)
