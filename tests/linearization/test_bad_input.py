"""What cannot be linearised says so, and says why."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ntkgp import Linearization
from ntkgp.linearization.inputs import validate_input


class Wrapped(nn.Module):
    """A layer followed by any function."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(3, 2), function

    def forward(self, x):
        return self.function(self.layer(x))


NET, X = nn.Linear(3, 2), torch.randn(4, 3)


@pytest.mark.parametrize(
    ("net", "x", "error", "message"),
    [
        (lambda x: x, X, TypeError, "net must be a torch.nn.Module, but is a function"),
        (nn.ReLU(), X, ValueError, "parameters selects nothing"),
        (NET, X[:0], ValueError, "x is empty"),
        (NET, X / 0, ValueError, "x holds NaN or infinity"),
        (NET, X.index_fill(0, torch.tensor(1), torch.nan), ValueError, "x holds NaN or infinity"),
        (NET, torch.tensor([[torch.inf, -torch.inf, 0.0]] * 2), ValueError, "x holds NaN or infinity"),
        (NET, X.double(), TypeError, "x has dtype torch.float64, but the network has torch.float32"),
        (NET, X.numpy(), TypeError, "x must be a tensor"),
        (NET, (X, X[:2]), ValueError, "must agree on the number of examples"),
        (NET, X.to("meta"), ValueError, "x is on meta, but the network is on cpu"),
        (Wrapped(lambda f: F.dropout(f, 0.5, training=True)), X, ValueError, "random in eval mode"),
        (Wrapped(lambda f: f - f.mean(0)), X, ValueError, "mixes examples"),
        (nn.Sequential(NET, nn.BatchNorm1d(2, track_running_stats=False)), X, ValueError, "mixes examples"),
        (
            Wrapped(lambda f: {"logits": f}),
            X,
            TypeError,
            "must return one tensor, or an object with its logits, but returned a dict",
        ),
        (Wrapped(lambda f: f.sum()), X, ValueError, "returned a scalar"),
        (Wrapped(lambda f: f.T), X, ValueError, "returned 2 rows for 7 examples"),
        (Wrapped(lambda f: (-f.exp()).log()), X, ValueError, "output holds NaN"),
    ],
)
def test_it_is_refused_with_a_reason(net, x, error, message):
    with pytest.raises(error, match=message):
        Linearization(net, example=x)


def test_numbers_whose_sum_overflows_are_taken():
    x = torch.full((4, 3), 3e38)
    assert not x.sum().isfinite()
    validate_input(x, x.dtype, x.device)
    x[2, 1] = -torch.inf
    with pytest.raises(ValueError, match="x holds NaN or infinity"):
        validate_input(x, x.dtype, x.device)


def test_unknown_parameter_names_are_listed():
    with pytest.raises(ValueError, match=r"names \['weights'\], which the network does not have; it has \['weight'"):
        Linearization(NET, parameters=["weights"])


def test_mixed_dtypes_are_refused():
    with pytest.raises(ValueError, match="several dtypes"):
        Linearization(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).double()))


def test_outputs_are_unknown_before_the_first_input():
    with pytest.raises(ValueError, match="num_outputs is not known yet: pass example="):
        _ = Linearization(NET).num_outputs


def test_vectors_of_the_wrong_length_are_named():
    lin = Linearization(NET, example=X)
    with pytest.raises(ValueError, match=r"v must have shape \(8,\)"):
        lin.jvp(X, torch.zeros(7))
    with pytest.raises(ValueError, match=r"u must have shape \(4, 2\)"):
        lin.vjp(X, torch.zeros(2, 4))
    with pytest.raises(TypeError, match="v must be a tensor"):
        lin.jvp(X, [0.0] * 8)


@pytest.mark.parametrize("outputs", [2, [0, -3], [], "mean", torch.ones(1, 3)])
def test_outputs_that_do_not_exist_cannot_be_selected(outputs):
    with pytest.raises(ValueError, match="outputs must"):
        Linearization(NET, example=X).select(outputs)


def test_a_changed_number_of_outputs_is_refused():
    net = nn.Sequential(nn.Conv1d(1, 1, 3), nn.Flatten())
    lin = Linearization(net, example=torch.randn(2, 1, 8))
    with pytest.raises(ValueError, match="return 8 outputs per example, but it returned 6 before"):
        lin(torch.randn(2, 1, 10))


class Dishonest(torch.autograd.Function):
    """Multiplies by w, and claims another gradient for batches of one."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0) * (1 if len(x) > 1 else 3)


def test_parameters_that_cannot_be_accounted_for_are_named():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.good, self.bad = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return Dishonest.apply(self.good(x), self.bad)

    with pytest.raises(ValueError, match=r"the Jacobian of \['bad'\] could not be accounted for"):
        Linearization(Net(), example=X)
