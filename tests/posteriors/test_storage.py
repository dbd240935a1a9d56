"""Save and load: the same posterior, or a clear refusal."""

import json

import pytest
import torch
from observations import SoftplusPoisson
from problems import Problem
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import ntkgp

METHODS = {
    "function": {},
    "full": {},
    "diag": {},
    "kron": {},
    "low_rank": {"rank": 6},
    "subnetwork": {"subnetwork": 9},
}


@pytest.mark.parametrize("refinement", [None, "laplace", "variational"])
@pytest.mark.parametrize("likelihood", ["noise by output", "categorical", "pixels"])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_loaded_is_what_was_saved(method, likelihood, refinement, tmp_path, float64):
    problem = Problem("cnn", likelihood)
    post = problem.fit(method, weights=torch.rand(8) + 0.5, **METHODS[method])
    if refinement == "variational" and method == "subnetwork":
        refinement = "laplace"
    post = post if refinement is None else post.refine(refinement)
    post.prior.precision = 0.7
    truth = post.latent(problem.x_new)
    post.save(tmp_path / "post")
    loaded = ntkgp.load(tmp_path / "post", problem.net)
    assert type(loaded) is type(post)
    found = loaded.latent(problem.x_new)
    assert_close(found.mean, truth.mean, rtol=1e-12, atol=0)
    assert_close(found.covariance_matrix, truth.covariance_matrix, rtol=1e-9, atol=1e-12)
    assert_close(loaded.log_evidence(), post.log_evidence(), rtol=1e-10, atol=0)
    assert_close(loaded.prior.precision, post.prior.precision)


def test_inputs_of_any_structure_are_kept(tmp_path, float64):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 3), nn.Linear(4, 3)

        def forward(self, left, right):
            return self.a(left).tanh() + self.b(right)

    net = Sum()
    x = {"left": torch.randn(6, 2), "right": torch.randn(6, 4)}
    post = ntkgp.fit(net, (x, torch.randint(0, 3, (6,))), method="function", tune=False)
    post.save(tmp_path / "post")
    loaded = ntkgp.load(tmp_path / "post", net)
    assert_close(loaded.latent(x).covariance_matrix, post.latent(x).covariance_matrix)


@pytest.fixture
def saved(tmp_path, float64):
    problem = Problem()
    problem.fit("function").save(tmp_path / "post")
    return problem, tmp_path / "post"


def test_nothing_is_overwritten(saved):
    problem, path = saved
    before = (path / "posterior.json").read_text()
    with pytest.raises(FileExistsError, match="exists: choose another"):
        problem.fit("diag").save(path)
    assert (path / "posterior.json").read_text() == before
    problem.fit("diag").save(path, overwrite=True)
    assert ntkgp.load(path, problem.net).method == "diag"


def test_another_network_is_refused(saved):
    problem, path = saved
    wider = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"its 0.weight has shape \(5, 3\), not \(6, 3\)"):
        ntkgp.load(path, wider)
    with pytest.raises(ValueError, match="has no parameter"):
        ntkgp.load(path, nn.Linear(3, 3))
    with torch.no_grad():
        problem.net[0].weight[0, 0] += 1e-9
    with pytest.raises(ValueError, match="weights or buffers do not"):
        ntkgp.load(path, problem.net)
    with pytest.raises(ValueError, match=r"dtype torch.float64, but the network has torch.float32"):
        ntkgp.load(path, problem.net.float())


def test_a_file_that_is_not_ours_or_was_cut_short_is_refused(saved, tmp_path):
    problem, path = saved
    with pytest.raises(FileNotFoundError, match="does not exist"):
        ntkgp.load(tmp_path / "nothing", problem.net)
    tensors = path / "tensors.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cut short"):
        ntkgp.load(path, problem.net)
    tensors.write_bytes(whole)
    meta = json.loads((path / "posterior.json").read_text())
    for change, match in (
        ({"format": "other"}, "not a saved posterior"),
        ({"version": 99}, "later version"),
        ({"tensors": [*meta["tensors"], "more"]}, "lacks more"),
    ):
        (path / "posterior.json").write_text(json.dumps(meta | change))
        with pytest.raises(ValueError, match=match):
            ntkgp.load(path, problem.net)
    (path / "posterior.json").write_text("{")
    with pytest.raises(ValueError, match="not a saved posterior, or was cut short"):
        ntkgp.load(path, problem.net)


def test_a_failed_save_leaves_nothing_behind(float64, tmp_path, monkeypatch):
    post = Problem().fit("function")
    monkeypatch.setattr("ntkgp.posteriors.storage.save_file", lambda *a: (_ for _ in ()).throw(OSError("full disk")))
    with pytest.raises(OSError, match="full disk"):
        post.save(tmp_path / "post")
    assert not list(tmp_path.iterdir())


def test_a_likelihood_of_ones_own_comes_with_the_call(tmp_path, float64):
    problem = Problem("mlp", "own")
    post = problem.fit("function")
    post.save(tmp_path / "post")
    with pytest.raises(ValueError, match="likelihood of your own: pass likelihood=SoftplusPoisson"):
        ntkgp.load(tmp_path / "post", problem.net)
    loaded = ntkgp.load(tmp_path / "post", problem.net, SoftplusPoisson())
    assert_close(loaded.latent(problem.x_new).covariance_matrix, post.latent(problem.x_new).covariance_matrix)


def test_a_posterior_of_a_stream_predicts_without_its_data_and_says_what_it_cannot_do(tmp_path, float64):
    problem = Problem("mlp", "categorical")
    loader = DataLoader(TensorDataset(problem.x, problem.y), batch_size=3)
    post = ntkgp.fit(problem.lin, loader, "categorical", "diag", problem.make_prior())
    post.save(tmp_path / "post")
    loaded = ntkgp.load(tmp_path / "post", problem.net)
    found, truth = loaded.latent(problem.x_new), post.latent(problem.x_new)
    assert_close(found.covariance_matrix, truth.covariance_matrix, rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="without its training data, which were a stream"):
        loaded.refine()
    loaded.likelihood.temperature = 2.0
    with pytest.raises(ValueError, match="without its training data, which were a stream"):
        loaded.latent(problem.x_new)
