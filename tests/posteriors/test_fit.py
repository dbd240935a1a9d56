"""The front door: choices, and bad input."""

import gc
import weakref

import pytest
import torch
from problems import Problem
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import ntkgp
from ntkgp.likelihoods import Gaussian
from ntkgp.linearization import Linearization
from ntkgp.posteriors import subsets
from ntkgp.posteriors.data import as_source
from ntkgp.posteriors.model import LinearModel


def test_auto_picks_the_cheaper_space_and_says_why(float64):
    problem = Problem("mlp", "categorical")
    few = ntkgp.fit(problem.lin, (problem.x, problem.y), tune=False)
    assert few.method == "function"
    assert "cheapest exact method" in few.reason
    x, y = torch.randn(2000, 3), torch.randint(0, 3, (2000,))
    assert ntkgp.fit(problem.lin, (x, y), tune=False).method == "full"
    small = ntkgp.fit(problem.lin, (x, y), tune=False, memory_budget=20_000)
    assert small.method == "function"
    assert len(small.model.data) < 2000
    assert "no exact method fits" in small.reason
    loader = DataLoader(TensorDataset(x, y), batch_size=500)
    assert ntkgp.fit(problem.lin, loader, tune=False).method == "full"
    assert ntkgp.fit(problem.lin, loader, tune=False, memory_budget=20_000).method == "kron"
    subset = ntkgp.fit(problem.lin, (x, y), tune=False, subset=20)
    assert (subset.method, len(subset.model.data)) == ("function", 20)


@pytest.mark.parametrize("method", ["function", "full", "kron", "diag", "sampled"])
def test_memory_is_free_as_soon_as_a_posterior_is_deleted(float64, method):
    problem = Problem("mlp", "categorical")
    gc.disable()
    try:
        post = ntkgp.fit(problem.lin, (problem.x, problem.y), "categorical", method)
        post.tune(steps=1)
        post.refine().predict(problem.x)
        gone = weakref.ref(post.model)
        del post
        assert gone() is None
    finally:
        gc.enable()


def test_some_outputs_of_many(float64):
    problem = Problem("mlp", "gaussian")
    post = ntkgp.fit(
        problem.net,
        (problem.x, problem.y[:, [2, 0]]),
        ntkgp.likelihoods.Gaussian(0.5).double(),
        "function",
        outputs=[2, 0],
        tune=False,
    )
    full = ntkgp.fit(
        problem.net,
        (problem.x, problem.y),
        ntkgp.likelihoods.Gaussian(0.5).double(),
        "function",
        tune=False,
        weights=torch.tensor([1.0, 0.0, 1.0]).expand(8, 3),
    )
    found, truth = post.latent(problem.x_new), full.latent(problem.x_new)
    assert_close(found.mean, truth.mean[:, [2, 0]])
    assert_close(found.covariance_matrix, truth.covariance_matrix[:, [2, 0]][:, :, [2, 0]])


def test_the_users_network_is_not_touched(float64):
    problem = Problem()
    problem.net.train()
    state = {name: t.clone() for name, t in problem.net.state_dict().items()}
    post = ntkgp.fit(problem.net, (problem.x, problem.y))
    post.predict(problem.x_new, predictive="bnn", num_samples=3)
    post.refine()
    assert problem.net.training
    for name, t in problem.net.state_dict().items():
        assert torch.equal(t, state[name])
    assert all(p.grad is None for p in problem.net.parameters())


def test_later_training_does_not_move_the_posterior(float64):
    problem = Problem()
    post = ntkgp.fit(problem.net, (problem.x, problem.y), tune=False)
    before = post.latent(problem.x_new)
    with torch.no_grad():
        for p in problem.net.parameters():
            p.add_(1.0)
    assert_close(post.latent(problem.x_new).mean, before.mean)


NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
X, Y = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"method": "laplace"}, ValueError, "method must be one of auto, function"),
        ({"likelihood": "softmax"}, ValueError, "likelihood must be one of gaussian"),
        ({"likelihood": nn.CrossEntropyLoss()}, TypeError, "likelihood must be a name or an ntkgp likelihood"),
        ({"prior": "gaussian"}, ValueError, "prior must be one of isotropic"),
        ({"prior": 1.0}, TypeError, "prior must be a name or an ntkgp prior, but is a float"),
        ({"tune": "yes"}, ValueError, "tune must be True, False"),
        ({"structure": "banded"}, ValueError, "structure must be one of full"),
        ({"subset": 7}, ValueError, "subset must be from 1 to the 6 training points, but is 7"),
        ({"subset": 3, "method": "kron"}, ValueError, "subset is for method"),
        ({"method": "subnetwork"}, ValueError, "subnetwork must say how many"),
        ({"method": "subnetwork", "subnetwork": 1000}, ValueError, "from 1 to 31 weights, but is 1000"),
        ({"method": "subnetwork", "subnetwork": ["9"]}, ValueError, "does not have"),
        ({"method": "low_rank", "rank": 0}, ValueError, "rank must be from 1 to 30, but is 0"),
        ({"method": "full", "rank": 3}, TypeError, "does not take 'rank'"),
        ({"data": (X, Y[:4])}, ValueError, "X has 6 points, but y has 4"),
        ({"data": (X[:0], Y[:0])}, ValueError, "empty"),
        ({"data": (X * torch.nan, Y)}, ValueError, "NaN"),
        ({"data": (X.double(), Y)}, TypeError, "dtype torch.float64, but the network has torch.float32"),
        ({"data": (X, Y + 1)}, ValueError, "classes from 0 to 2, but has values from 1 to 3"),
        ({"data": (X, Y.float())}, TypeError, "integer class indices"),
        ({"data": 3}, TypeError, "data must be"),
        ({"data": TensorDataset(X[:0], Y[:0])}, ValueError, "empty dataset"),
        ({"data": DataLoader(TensorDataset(X[:0], Y[:0]), batch_size=2)}, ValueError, "empty loader"),
        ({"weights": torch.ones(4)}, ValueError, r"weights must have shape \(6,\) or \(6, 1\), but has \(4,\)"),
        ({"weights": -torch.ones(6)}, ValueError, "weights must be finite and not negative"),
        ({"net": lambda x: x}, TypeError, "net must be a torch.nn.Module, but is a function"),
        ({"outputs": [5]}, ValueError, "outputs must be indices into 3 outputs"),
        ({"net": nn.Sequential(nn.Linear(3, 1))}, ValueError, "use bernoulli"),
    ],
)
def test_bad_input_is_named(arguments, error, match):
    call = {"net": NET, "data": (X, Y), "tune": False} | arguments
    with pytest.raises(error, match=match):
        ntkgp.fit(call.pop("net"), call.pop("data"), **call)


def test_weights_need_data_in_memory():
    loader = DataLoader(TensorDataset(X, Y), batch_size=2)
    with pytest.raises(ValueError, match="weights need data in memory"):
        ntkgp.fit(NET, loader, weights=torch.ones(6))


def test_a_prior_of_another_network_is_refused():
    other = ntkgp.Linearization(nn.Linear(3, 3), example=X)
    with pytest.raises(ValueError, match="prior is over other parameters"):
        ntkgp.fit(NET, (X, Y), prior=ntkgp.priors.Isotropic(other))


def test_class_balance_needs_classes():
    with pytest.raises(ValueError, match="needs one class label"):
        ntkgp.fit(NET, (X, torch.randn(6, 3)), "gaussian", subset=subsets.Stratified(3))


@pytest.mark.parametrize("method", ["function", "full", "diag", "kron", "low_rank"])
def test_a_posterior_moves_to_another_dtype(method):
    problem = Problem("cnn", "gaussian")
    options = {"rank": 6} if method == "low_rank" else {}
    post = problem.fit(method, **options).refine()
    single = post.latent(problem.x_new)
    double = post.double()
    assert double is post
    found = post.latent(problem.x_new.double())
    assert found.mean.dtype == torch.float64
    assert post.prior.precision.dtype == post.likelihood.noise.dtype == torch.float64
    assert_close(found.mean, single.mean.double(), rtol=1e-4, atol=1e-4)
    assert_close(found.covariance_matrix, single.covariance_matrix.double(), rtol=1e-3, atol=1e-4)
    assert post.log_evidence().dtype == torch.float64


def test_progress_is_shown_when_asked(float64, monkeypatch, capsys):
    problem = Problem()
    post = problem.fit("function")
    monkeypatch.setattr("ntkgp.posteriors.base._PREDICT_BYTES", 1)
    post.predict(problem.x_new, progress=True)
    assert "predict" in capsys.readouterr().err
    post.predict(problem.x_new, progress=False)
    post.tune(progress=True)
    assert "tune" in capsys.readouterr().err


def test_features_that_cannot_be_captured_are_not_tried(float64, monkeypatch):
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 3, padding=1), nn.Flatten())
    x = torch.randn(1, 1, 6, 6)
    lin = Linearization(net, example=x)
    monkeypatch.setattr(lin, "pilot", lambda: pytest.fail("features were captured to see their size"))
    C, cotangents = 36, 4 * 36 + 36
    assert lin.capture_bytes == cotangents * (C + 1) * 8
    model = LinearModel(lin, as_source((x, torch.randn(1, C)), lin, Gaussian()), Gaussian(), lin.capture_bytes - 1)
    assert not model.kept
    assert [len(chunk.data) for chunk in model] == [1]
