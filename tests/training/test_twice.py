"""Second derivatives of our own are those of torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from ntkgp.training import VariationalLaplace
from ntkgp.training import variational_laplace as module
from ntkgp.training.twice import QuickSecondDerivatives

OPERATIONS = {
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1), (2, 2, 7), (3, 2, 3), (3,)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, (1, 2), (1, 0), (2, 1)), (2, 2, 5, 4), (3, 2, 2, 2), (3,)),
    "grouped": (lambda x, w, b: F.conv2d(x, w, b, groups=2), (2, 4, 3, 3), (2, 2, 2, 2), (2,)),
    "same": (lambda x, w, b: F.conv2d(x, w, b, padding="same"), (2, 2, 3, 3), (2, 2, 3, 3), (2,)),
    "transposed": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, output_padding=1, groups=2, dilation=2),
        (2, 4, 3, 2),
        (4, 1, 2, 2),
        (2,),
    ),
    "without bias": (lambda x, w: F.conv2d(x, w), (2, 2, 3, 3), (2, 2, 2, 2)),
    "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (4, 2, 3), (2,), (2,)),
    "batch norm of vectors": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True, eps=0.3), (5, 2), (2,), (2,)),
    "batch norm without bias": (lambda x, w: F.batch_norm(x, None, None, w, training=True), (3, 2, 2, 2), (2,)),
    "batch norm without weights": (lambda x: F.batch_norm(x, None, None, training=True), (4, 2, 2)),
    "softplus": (lambda x: F.softplus(x), (3, 4)),
    "steep softplus": (lambda x: nn.Softplus(2.5)(x), (3, 4)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_they_are_right(name, float64):
    function, *shapes = OPERATIONS[name]
    tensors = tuple(torch.randn(shape, requires_grad=True) for shape in shapes)

    def ours(*tensors):
        with QuickSecondDerivatives():
            return function(*tensors)

    assert_close(ours(*tensors), function(*tensors))
    assert gradcheck(ours, tensors)
    assert gradgradcheck(ours, tensors)
    for i in range(len(tensors)):  # some may be frozen
        frozen = tuple(t.detach() if j == i else t for j, t in enumerate(tensors))
        assert len(tensors) == 1 or gradgradcheck(ours, frozen)


@pytest.mark.parametrize("frozen", [None, 0, 2])
def test_the_loss_of_a_convolutional_network_has_the_gradients_that_torch_gives_it(frozen, float64, monkeypatch):
    found = {}
    for name, context in (("ours", QuickSecondDerivatives), ("torch's", torch.enable_grad)):
        torch.manual_seed(0)
        net = nn.Sequential(
            *(nn.Conv2d(1, 3, 3, padding=1), nn.Softplus(), nn.Conv2d(3, 2, 2, bias=False), nn.Softplus(3.0)),
            nn.BatchNorm2d(2),
            *(nn.AvgPool2d(2), nn.ConvTranspose2d(2, 2, 2, stride=2), nn.Flatten(), nn.Linear(8, 3)),
        )
        if frozen is not None:
            net[frozen].weight.requires_grad_(False)
        vl = VariationalLaplace(net, num_data=4, seed=3)
        monkeypatch.setattr(module, "QuickSecondDerivatives", context)
        vl.loss(torch.randn(4, 1, 4, 4), torch.tensor([0, 1, 2, 0])).backward()
        found[name] = [p.grad for p in vl.parameters() if p.requires_grad]
    for ours, torchs in zip(found["ours"], found["torch's"], strict=True):
        assert_close(ours, torchs, rtol=1e-9, atol=1e-12)


def test_batch_norm_moves_its_running_statistics_once():
    found = {}
    for name, context in (("ours", QuickSecondDerivatives), ("torch's", torch.enable_grad)):
        torch.manual_seed(0)
        norm, x = nn.BatchNorm2d(3, momentum=0.3), torch.randn(4, 3, 2, 2)
        with context():
            norm(x)
        found[name] = norm.state_dict()
    assert not torch.equal(found["ours"]["running_mean"], torch.zeros(3))
    for key, value in found["torch's"].items():
        assert_close(found["ours"][key], value)


@pytest.mark.parametrize("name", ["conv2d", "batch norm", "softplus"])
def test_a_third_derivative_is_refused(name, float64):
    function, *shapes = OPERATIONS[name]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with QuickSecondDerivatives():
        value = function(*tensors).square().sum()
    first = torch.autograd.grad(value, tensors, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        second[0].sum().backward()


@pytest.mark.parametrize("name", ["conv2d", "batch norm", "steep softplus"])
def test_float32_is_close_to_float64(name):
    function, *shapes = OPERATIONS[name]
    torch.manual_seed(0)
    exact = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    exact[0] += 10  # far from zero beside its deviation
    found = []
    for dtype in (torch.float32, torch.float64):
        tensors = [t.to(dtype).requires_grad_() for t in exact]
        with QuickSecondDerivatives():
            value = function(*tensors).pow(3).sum()  # squares of what is normalised have no gradient
        first = torch.autograd.grad(value, tensors, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), tensors))
    for single, double in zip(*found, strict=True):
        assert single.dtype == torch.float32
        assert (single - double).norm() < 1e-3 * double.norm()
