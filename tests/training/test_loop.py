"""The loop that all objectives share: seeds, checkpoints, progress, and the posterior it ends in."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ntkgp
from ntkgp.posteriors import GivenDiagonalPosterior
from ntkgp.training import MaximumAPosteriori, MeanFieldVI, VariationalLaplace

OBJECTIVES = [VariationalLaplace, MeanFieldVI, MaximumAPosteriori]


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 6), nn.Softplus(), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 2))


def data(n=40):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 2, generator=generator, dtype=torch.get_default_dtype())
    return x, (x.sum(1) > 0).long()


def states(objective):
    return {name: t.clone() for name, t in objective.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    "optimizer", [torch.optim.Adam, lambda g: torch.optim.SGD(g, momentum=0.9)], ids=["adam", "sgd"]
)
def test_a_run_that_goes_on_equals_one_that_was_not_stopped(objective, optimizer, tmp_path, monkeypatch):
    options = {"epochs": 5, "batch_size": 16, "lr": 1e-2, "milestones": (3,), "optimizer": optimizer}
    whole = objective(network(), beta=0.5, seed=4)
    whole.fit(data(), **options)
    monkeypatch.setattr("ntkgp.training.loop._EVERY", 4)
    parts = objective(network(), beta=0.5, seed=4)
    terms = parts.terms
    calls = iter(range(100))
    parts.terms = lambda *args: terms(*args) if next(calls) < 8 else (_ for _ in ()).throw(Stopped)
    with pytest.raises(Stopped):
        parts.fit(data(), checkpoint=tmp_path / "run", **options)
    again = objective(network(), beta=0.5, seed=4)
    again.fit(data(), checkpoint=tmp_path / "run", **options)
    assert same(states(again), states(whole))
    assert again.history == whole.history
    assert [entry["epoch"] for entry in again.history] == list(range(5))
    longer = objective(network(), beta=0.5, seed=4)  # a finished run may be prolonged
    longer.fit(data(), checkpoint=tmp_path / "run", **(options | {"epochs": 6}))
    assert len(longer.history) == 6


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_seeds_decide(objective):
    runs = [objective(network(), seed=seed) for seed in (0, 0, 1)]
    for run in runs:
        run.fit(data(), epochs=2, batch_size=16)
    assert same(states(runs[0]), states(runs[1]))
    assert not same(states(runs[0]), states(runs[2]))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_training_lowers_the_loss_and_leaves_the_mode_alone(objective):
    run = objective(network().eval())
    post = run.fit(data(200), epochs=30, lr=1e-2, progress=False)
    assert run.history[-1]["loss"] < run.history[0]["loss"] - 0.05
    assert not run.net.training
    assert run.num_data == 200
    assert post.history == run.history
    x, y = data(200)
    assert (post.predict(x, predictive="map").probs.argmax(1) == y).float().mean() > 0.8


@pytest.mark.parametrize("objective", [VariationalLaplace, MeanFieldVI])
def test_the_posterior_is_q(objective, tmp_path, float64):
    run = objective(network().double(), prior_std={"0": 0.5, "2": 1.0, "4": 2.0})
    x, y = data()
    post = run.fit((x, y), epochs=2, batch_size=16)
    assert isinstance(post, GivenDiagonalPosterior)
    variances = run.variances().detach()
    assert_close(post.lin.theta, run.mean().detach())
    J = post.lin.jacobian(x[:5])
    truth = torch.einsum("ncp,p,ndp->ncd", J, variances, J)
    q = post.latent(x[:5])
    assert_close(q.covariance_matrix, truth, rtol=1e-9, atol=1e-12)
    assert_close(q.mean, run.net.eval()(x[:5]).detach())
    joint = post.latent(x[:5], joint=True).covariance_matrix
    assert_close(joint, torch.einsum("ncp,p,mdp->ncmd", J, variances, J).reshape(10, 10), rtol=1e-9, atol=1e-12)
    draws = post.sample_weights(4000, torch.Generator().manual_seed(0))
    assert_close(draws.var(0) / variances, torch.ones_like(variances), rtol=0, atol=0.15)
    for predictive in ("glm", "bnn", "map"):
        assert post.predict(x[:5], predictive=predictive, num_samples=20).probs.shape == (5, 2)
    P = len(variances)
    gamma = post.effective_parameters()
    assert_close(gamma.sum(), P - (variances / run.prior_std.square()).sum(), rtol=1e-9, atol=0)
    log_joint = post._log_joint(torch.zeros(P))
    assert_close(post.log_evidence(at="map"), log_joint - (run.prior_std.square() / variances).log().sum() / 2)
    post.save(tmp_path / "post")
    loaded = ntkgp.load(tmp_path / "post", run.net)
    assert type(loaded) is GivenDiagonalPosterior
    assert_close(loaded.latent(x[:5]).covariance_matrix, truth, rtol=1e-9, atol=1e-12)
    refined = post.refine()
    assert_close(refined.latent(x[:5]).covariance_matrix, truth, rtol=1e-9, atol=1e-12)
    before = post.log_evidence(at="map").item()
    assert post.tune(at="map", steps=3).log_evidence(at="map").item() >= before


def test_a_loop_of_ones_own_gives_the_same_posterior_object(float64):
    x, y = data()
    vl = VariationalLaplace(network().double().eval(), num_data=40)
    groups = vl.parameter_groups(1e-3)
    assert [group["lr"] for group in groups] == [1e-3, 1e-2]
    assert_close(vl.log_sigma, vl.prior_std.log() - 3)
    optimizer = torch.optim.Adam(groups)
    for _ in range(3):
        optimizer.zero_grad()
        vl.loss(x, y).backward()
        optimizer.step()
    post = vl.posterior((x, y))
    assert_close(post.sample_weights(3000, torch.Generator().manual_seed(0)).mean(0), vl.mean(), rtol=0, atol=0.01)
    assert post.log_evidence().isfinite()


def test_a_likelihood_is_learnt_with_the_weights(float64):
    torch.manual_seed(0)
    x = torch.randn(200, 2)
    y = x.sum(1, keepdim=True) + 0.3 * torch.randn(200, 1)
    vl = VariationalLaplace(nn.Linear(2, 1).double(), ntkgp.likelihoods.Gaussian(1.0))
    assert len(vl.parameter_groups(1e-3)) == 3
    post = vl.fit((x, y), epochs=150, batch_size=50, lr=0.02)
    assert 0.06 < post.likelihood.noise < 0.13
    fixed = VariationalLaplace(nn.Linear(2, 1), ntkgp.likelihoods.Gaussian(1.0, learn_noise=False))
    assert len(fixed.parameter_groups(1e-3)) == 2


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loaders_and_datasets_are_read(objective):
    x, y = data()
    runs = [objective(network().eval()) for _ in range(2)]
    runs[0].fit(TensorDataset(x, y), epochs=1, batch_size=8)
    post = runs[1].fit(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True), epochs=1)
    assert runs[0].num_data == runs[1].num_data == 40
    assert post.latent(x[:3]).mean.shape == (3, 2)


def test_frozen_parameters_stay(float64):
    net = network().double()
    net[0].weight.requires_grad_(False)
    before = net[0].weight.clone()
    vl = VariationalLaplace(net)
    post = vl.fit(data(), epochs=1)
    assert torch.equal(net[0].weight, before)
    assert "0.weight" not in post.lin.layout.names


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(2), 0)])


def test_bad_input_is_named(tmp_path):
    x, y = data()
    vl = VariationalLaplace(network(), seed=1)
    for options in ({"epochs": 0}, {"epochs": 1, "batch_size": 0}, {"epochs": 1, "lr": 0.0}):
        with pytest.raises(ValueError, match="must be positive"):
            vl.fit((x, y), **options)
    with pytest.raises(ValueError, match="num_data is 10, but data have 40 points"):
        VariationalLaplace(network(), num_data=10).fit((x, y), epochs=1)
    with pytest.raises(ValueError, match="num_data must be given"):
        vl.fit(DataLoader(Stream()), epochs=1)
    with pytest.raises(ValueError, match="NaN or infinity"):
        vl.fit((x * torch.nan, y), epochs=1)
    with pytest.raises(TypeError, match="data must be"):
        vl.fit(x, epochs=1)
    with pytest.raises(RuntimeError, match=r"the loss is \w+ at step \d+: try a smaller lr"):
        VariationalLaplace(network()).fit((x, y), epochs=50, lr=1e8)
    vl.fit((x, y), epochs=1, checkpoint=tmp_path / "run")
    with pytest.raises(ValueError, match=r"belongs to another run: its lr is 0\.001"):
        vl.fit((x, y), epochs=1, lr=0.1, checkpoint=tmp_path / "run")
    with pytest.raises(ValueError, match=r"belongs to another run: its prior_std is 1\.0"):
        VariationalLaplace(network(), prior_std=2.0, seed=1).fit((x, y), epochs=1, checkpoint=tmp_path / "run")
    with pytest.raises(ValueError, match="belongs to another run: its objective is VariationalLaplace"):
        MaximumAPosteriori(network(), seed=1).fit((x, y), epochs=1, checkpoint=tmp_path / "run")
    (tmp_path / "cut").write_bytes((tmp_path / "run").read_bytes()[:100])
    with pytest.raises(ValueError, match="cut short"):
        vl.fit((x, y), epochs=1, checkpoint=tmp_path / "cut")


def test_bad_variances_are_named(float64):
    lin = ntkgp.Linearization(network().double().eval(), example=data()[0])
    post = ntkgp.fit(lin, data(), method="diag", tune=False)
    make = GivenDiagonalPosterior.of
    with pytest.raises(ValueError, match=r"variances must have shape"):
        make(post.model, post.prior, post.likelihood, torch.ones(3))
    with pytest.raises(ValueError, match="variances must be positive"):
        make(post.model, post.prior, post.likelihood, torch.zeros(lin.num_params))
