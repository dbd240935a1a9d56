"""Training sparse processes: minibatches, hyperparameters, what is kept, and runs that were killed."""

import pytest
import torch
from problems import Problem
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import ntkgp
from ntkgp.posteriors import Inducing, sparse_training
from ntkgp.posteriors.bound import Averages
from ntkgp.posteriors.feed import Feed
from ntkgp.posteriors.sparse_steps import Steps
from ntkgp.posteriors.sparse_training import Run
from ntkgp.posteriors.whitened import Factored

LIKELIHOODS = ["gaussian", "bernoulli", "poisson", "categorical"]
QUICK = {"num_inducing": 12, "batch_size": 16, "epochs": 6}


def problem(likelihood="categorical", prior="grouped", network="mlp", n=60):
    return Problem(network, likelihood, prior, n=n).informed(1.0)


def loader_of(p, size=16, **options):
    return DataLoader(TensorDataset(p.x, p.y), batch_size=size, **options)


def fit(p, data, **options):
    return ntkgp.fit(p.lin, data, p.make_likelihood(), "variational", p.make_prior(), **options)


# Minibatches


@pytest.mark.parametrize("mean", ["network", "linear"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_minibatches_come_close_to_the_best_bound(likelihood, mean, float64):
    p = problem(likelihood)
    best = p.fit("variational", num_inducing=12, mean=mean, batch_size=None, epochs=60)
    post = p.fit("variational", num_inducing=12, mean=mean, batch_size=16, epochs=15)
    start = p.fit("variational", num_inducing=12, mean=mean, objective="nystrom")
    assert best.log_evidence() >= post.log_evidence() - best.bound().standard_error
    assert_close(post.log_evidence(), best.log_evidence(), rtol=0, atol=0.3)
    if likelihood != "gaussian":
        assert post.log_evidence() > start.log_evidence()


def test_seeds_repeat_and_differ(float64):
    p = problem()
    a, b, c = (p.fit("variational", **QUICK | {"inducing": Inducing(p.x[:4])}, seed=s) for s in (0, 0, 1))
    assert torch.equal(a.q.P, b.q.P)
    assert not torch.equal(a.q.P, c.q.P)


@pytest.mark.parametrize("objective", ["elbo", "predictive"])
@pytest.mark.parametrize("prior", ["grouped", "diagonal"])
def test_after_the_first_epoch_nothing_is_differentiated(prior, objective, float64, monkeypatch):
    p = problem(prior=prior)
    epoch = Run._next_epoch

    def refuse(*args, **kwargs):
        raise AssertionError("the network was differentiated again")

    def forbid(self, state):
        for name in ("features", "__call__", "jvp", "vjp", "factors"):
            monkeypatch.setattr(ntkgp.Linearization, name, refuse)
        return epoch(self, state)

    monkeypatch.setattr(Run, "_next_epoch", forbid)
    post = p.fit("variational", objective=objective, **QUICK)
    if prior == "grouped":  # nor under other hyperparameters
        before = post.prior.precision.detach().clone()
        post.tune(epochs=3)
        assert not torch.equal(post.prior.precision, before)
    with torch.no_grad():
        post.log_evidence()


def test_a_step_sees_no_more_than_its_minibatch(float64, monkeypatch):
    p, sizes = problem(n=100), []
    pieces = Feed.pieces
    monkeypatch.setattr(
        Feed, "pieces", lambda self, batch, kernel: sizes.append(len(batch.data)) or pieces(self, batch, kernel)
    )
    p.fit("variational", num_inducing=12, batch_size=10, epochs=3)
    assert sizes[0] == 100
    assert set(sizes[1:-1]) == {10}


@pytest.mark.parametrize("objective", ["elbo", "alpha"])
@pytest.mark.parametrize("mean", ["network", "linear"])
def test_data_beyond_the_budget_are_streamed_to_the_same_result(mean, objective, float64):
    p = problem("bernoulli", network="cnn")
    options = QUICK | {"inducing": Inducing(p.x[:4]), "mean": mean, "objective": objective}
    kept, streamed = p.fit("variational", **options), p.fit("variational", memory_budget=20_000, **options)
    assert kept.process.feed(False).table is not None
    assert streamed.process.feed(False).table is None
    assert_close(streamed.q.P, kept.q.P, rtol=1e-6, atol=1e-7)
    assert_close(streamed.q.mean, kept.q.mean, rtol=1e-6, atol=1e-7)
    assert_close(streamed.log_evidence(), kept.log_evidence(), rtol=1e-7, atol=0)


def test_a_prior_of_many_groups_is_kept_whole_where_its_parts_do_not_fit(float64):
    p = problem("bernoulli")
    size = p.fit("variational", **QUICK).process._table_bytes(1)
    post = p.fit("variational", memory_budget=size + 1, **QUICK)
    kernel, view = post.process.view(False, False)
    assert (kernel.by_atom, len(kernel.atoms), view.w.tolist()) == (False, 1, [1.0])
    assert post.process.feed(False).table is not None
    assert_close(post.q.P, p.fit("variational", **QUICK).q.P, rtol=1e-8, atol=1e-9)
    assert_close(post.effective_parameters(), p.fit("variational", **QUICK).effective_parameters())


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_a_streamed_pass_is_that_over_arrays(likelihood, float64):
    p = problem(likelihood)
    for mean in ("network", "linear"):
        options = {"objective": "nystrom", "inducing": Inducing(p.x[:5]), "mean": mean}
        a, b = fit(p, (p.x, p.y), **options), fit(p, loader_of(p, size=60), **options)
        assert_close(a.q.P, b.q.P, rtol=1e-9, atol=1e-10)
        assert_close(a.q.mean, b.q.mean, rtol=1e-7, atol=1e-9)
        assert_close(a.log_evidence(), b.log_evidence(), rtol=1e-9, atol=0)
    assert b.process.N == 60


def test_loaders_are_trained_on_in_an_order_of_the_seed(float64):
    p = problem("bernoulli")
    best = fit(p, (p.x, p.y), num_inducing=12, mean="linear", batch_size=None, epochs=40)
    found = [
        fit(p, loader_of(p, shuffle=shuffle), inducing=best.inducing, mean="linear", epochs=15)
        for shuffle in (False, True)
    ]
    assert torch.equal(found[0].q.P, found[1].q.P)
    assert_close(found[0].log_evidence(), best.log_evidence(), rtol=0, atol=0.3)


# α-energies


@pytest.mark.parametrize("mean", ["network", "linear"])
@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli", "poisson"])
def test_the_energy_and_its_gradients_are_those_of_a_dense_reference(likelihood, mean, float64):
    p = problem(likelihood, n=10)
    post = p.fit("variational", num_inducing=5, mean=mean, epochs=1)
    near, alpha = Factored.near(post.q), 0.7
    t, raw = (0.3 * torch.randn(5)) if mean == "linear" else torch.zeros(5), 0.3 * torch.randn(5, 5).tril()
    leaves = t.requires_grad_(), raw.requires_grad_()
    feed = post.process.feed(False)
    measure = Steps(post, feed, False).on(next(feed.in_order()))
    found = measure.under(near.at(*leaves), Averages(alpha), 0).value

    _, view = post.process.view(False, post.free)
    rows = post.process.feed(False).table[torch.arange(10)]
    W, own = rows.whitened(view.w, view.L)
    root = near.A @ (raw.tril(-1) + raw.diagonal().exp().diag())
    m, S = near.m0 + near.A @ t, root @ root.mT
    mu = rows.f + rows.moved if mean == "linear" else rows.f
    centre = mu + (W @ m).view_as(mu)
    variance = own.diagonal(dim1=-2, dim2=-1) + ((W @ (S - torch.eye(5))) * W).sum(1).view_as(mu)
    z = torch.linspace(-9, 9, 3001)
    w = (-z.square() / 2).softmax(0)
    f = centre + z[:, None, None] * variance.sqrt()
    powers = (alpha * post.likelihood.site_log_prob(post.model.data.y, f)).exp()
    kl = (S.diagonal().sum() + m.square().sum() - 5 - torch.logdet(S)) / 2
    truth = (torch.tensordot(w, powers, 1).log() / alpha).sum() - kl
    assert_close(found, truth, rtol=1e-5, atol=0)
    found, truth = (torch.autograd.grad(value, leaves, allow_unused=True) for value in (found, truth))
    assert_close(found[1].tril(), truth[1], rtol=1e-3, atol=1e-3)
    if mean == "linear":
        assert_close(found[0], truth[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("likelihood", ["bernoulli", "categorical"])
def test_training_raises_the_energy_above_that_of_the_bounds_q(likelihood, float64):
    p = problem(likelihood)
    options = {"num_inducing": 12, "batch_size": None}
    elbo = p.fit("variational", epochs=40, **options)
    post = p.fit("variational", objective="predictive", epochs=200, **options)
    feed = post.process.feed(False)
    measure = Steps(post, feed, False).on(next(feed.in_order()))
    energies = [measure.under(q, Averages(1.0, 2000), 1).value for q in (elbo.q, post.q)]
    assert energies[1] > energies[0] + 0.05
    assert post.log_evidence() < elbo.log_evidence()
    assert post.history[-1]["energy"] > post.history[110]["energy"]


# Hyperparameters


def test_hyperparameters_are_live(float64):
    p = problem()
    post = p.fit("variational", **QUICK)
    before = post.latent(p.x_new).variance
    post.prior.precision = 3.0
    fresh = p.fit("variational", inducing=post.inducing, batch_size=16, epochs=6)
    fresh.prior.precision = 3.0
    assert (post.latent(p.x_new).variance < before).all()
    assert torch.equal(post.latent(p.x_new).variance, fresh.latent(p.x_new).variance)


@pytest.mark.filterwarnings("ignore:the mode of the linear model gains")
@pytest.mark.parametrize(("at", "mean"), [("linear_mode", "network"), ("linear_mode", "linear"), ("map", "network")])
def test_with_all_values_tuning_finds_what_the_exact_evidence_finds(at, mean, float64):
    p = problem("gaussian", n=15)
    truth = p.fit("function").tune(at, steps=200)
    post = p.fit("variational", inducing=Inducing(p.x), mean=mean).tune(at, steps=200)
    assert_close(post.prior.precision, truth.prior.precision, rtol=1e-3, atol=0)
    assert_close(post.likelihood.noise, truth.likelihood.noise, rtol=1e-3, atol=0)
    assert post.shift is None if mean == "network" else post.shift is not None
    if mean == "linear":
        assert_close(post.log_evidence(), truth.log_evidence(), rtol=1e-6, atol=0)
    elif at == "map":
        assert_close(post.log_evidence("map"), truth.log_evidence("map"), rtol=1e-6, atol=0)


@pytest.mark.parametrize("mean", ["network", "linear"])
@pytest.mark.parametrize(
    ("batch_size", "epochs", "relative", "nats"),
    [(None, 600, 5e-3, 1e-4), (30, 150, 0.2, 0.1)],  # minibatches of a bound that is flat in the precision
    ids=["all points", "minibatches"],
)
def test_adam_finds_what_the_collapsed_bound_finds(batch_size, epochs, relative, nats, mean, float64):
    p = problem("gaussian", prior="isotropic")
    options, at = {"inducing": Inducing(p.x[::4]), "mean": mean}, "map" if mean == "network" else "bound"
    truth = p.fit("variational", **options).tune(method="collapsed", steps=200)
    post = p.fit("variational", batch_size=batch_size, **options).tune(method="adam", epochs=epochs)
    assert_close(post.prior.precision, truth.prior.precision, rtol=relative, atol=0)
    assert_close(post.likelihood.noise, truth.likelihood.noise, rtol=min(relative, 0.02), atol=0)
    assert truth.log_evidence(at) + 1e-8 >= post.log_evidence(at) > truth.log_evidence(at) - nats


@pytest.mark.parametrize("prior", ["isotropic", "diagonal"])
@pytest.mark.parametrize("at", ["map", "linear_mode"])
def test_tuning_raises_a_bound_of_the_linear_model_and_keeps_the_networks_mean(at, prior, float64):
    p = problem("categorical", prior=prior)
    post = p.fit("variational", **QUICK)
    post.prior.precision = 30.0
    bound = lambda: post.log_evidence("map") if at == "map" else post.refine().log_evidence()  # noqa: E731
    before = bound()
    post.tune(at, epochs=15)
    assert bound() > before + 1
    assert torch.equal(post.latent(p.x_new).mean, p.lin(p.x_new))
    assert any("precision" in line and "bound" in line for line in post.history)


@pytest.mark.parametrize("at", ["map", "network"])
def test_an_energy_tunes_by_itself(at, float64):
    p = problem("categorical", prior="isotropic")
    post = p.fit("variational", objective="predictive", **QUICK)
    q, before = post.q, post.prior.precision.item()
    post.tune(at, epochs=20)
    assert post.prior.precision.item() != before
    assert post.q is not q
    lines = [line for line in post.history if "energy" in line]
    if at == "network":
        assert lines[-1]["energy"] > lines[0]["energy"]


def test_the_elbo_of_a_fixed_mean_prefers_no_variance_and_that_of_the_weights_does_not(float64):
    p = problem("categorical", prior="isotropic")
    post = p.fit("variational", num_inducing=12, batch_size=None)
    fixed, weights = [], []
    for precision in (0.1, 1.0, 10.0, 100.0, 1e4):
        post.prior.precision = precision
        fixed.append(post.log_evidence().item())
        weights.append(post.log_evidence("map").item())
    assert fixed == sorted(fixed)
    assert 0 < weights.index(max(weights)) < 4


def test_a_grid_on_validation_data_trains_q_for_each_of_its_values(float64):
    p = problem("categorical", prior="isotropic")
    post = p.fit("variational", **QUICK)
    post.tune(validation=(p.x, p.y), grid=torch.tensor([0.1, 1.0, 100.0]))
    scores = [line["validation_log_prob"] for line in post.history if "validation_log_prob" in line]
    assert len(set(scores)) == 3
    assert post.prior.precision.item() == pytest.approx(0.8 * [0.1, 1.0, 100.0][scores.index(max(scores))])


def test_inducing_points_that_learn_raise_the_bound(float64):
    p = problem("bernoulli")
    options = {"inducing": Inducing(p.x[:2] + 0.5), "mean": "linear", "batch_size": None, "epochs": 40}
    fixed, moved = p.fit("variational", **options), p.fit("variational", learn_inducing=True, **options)
    assert not torch.equal(moved.inducing.x, fixed.inducing.x)
    assert moved.log_evidence() > fixed.log_evidence() + 0.5
    tuned = p.fit("variational", **options | {"learn_inducing": True}, tune=False).tune(epochs=3)
    assert not torch.equal(tuned.inducing.x, fixed.inducing.x)


def test_what_cannot_be_tuned_is_named(float64):
    post = problem().fit("variational", **QUICK)
    with pytest.raises(ValueError, match='at must be "map", "linear_mode" or "network", but is \'mode\''):
        post.tune("mode")
    with pytest.raises(ValueError, match='at="network" needs an α-energy'):
        post.tune("network")
    with pytest.raises(ValueError, match="at must be \"linear_mode\" where the mean is free, but is 'map'"):
        post.refine().tune("map")
    with pytest.raises(ValueError, match='method must be "adam" or "collapsed", but is \'em\''):
        post.tune(method="em")
    with pytest.raises(ValueError, match='method="collapsed" is for Gaussian noise'):
        post.tune(method="collapsed")
    post.prior.raw_precision.requires_grad_(False)
    with pytest.raises(ValueError, match="there is nothing to tune"):
        post.tune()


def test_a_run_that_fails_leaves_hyperparameters_as_they_were(float64, monkeypatch):
    post = problem().fit("variational", **QUICK)
    before, q = post.prior.precision.detach().clone(), post.q
    adam, calls = Run._adam, []

    def die(self, *args):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return adam(self, *args)

    monkeypatch.setattr(Run, "_adam", die)
    with pytest.raises(KeyboardInterrupt):
        post.tune(epochs=5)
    assert torch.equal(post.prior.precision, before)
    assert post._q() is q


# Killed and resumed


RUNS = {
    "elbo": {},
    "free mean": {"mean": "linear"},
    "all data at once": {"mean": "linear", "batch_size": None},
    "energy": {"objective": "alpha", "mean": "linear"},
    "streamed": {"memory_budget": 10_000},
    "tuned": {"tune": True},
    "tuned energy": {"objective": "predictive", "tune": True},
    "inducing points": {"learn_inducing": True},
}


@pytest.mark.parametrize("dies", [3, 14])
@pytest.mark.parametrize("run", RUNS)
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(run, dies, float64, tmp_path, monkeypatch):
    p = problem(n=40)
    options = QUICK | RUNS[run]
    monkeypatch.setattr(sparse_training, "_EVERY", 2)
    monkeypatch.setattr("ntkgp.posteriors.sparse_tuning._STEPS", 12)
    whole = p.fit("variational", **options)
    step, calls = Run._step, []

    def die(self, state, batch):
        calls.append(1)
        if len(calls) == dies:
            raise KeyboardInterrupt
        return step(self, state, batch)

    monkeypatch.setattr(Run, "_step", die)
    if dies < 7 or run != "all data at once":
        with pytest.raises(KeyboardInterrupt):
            p.fit("variational", checkpoint=tmp_path / "state", **options)
    monkeypatch.setattr(Run, "_step", step)
    resumed = p.fit("variational", checkpoint=tmp_path / "state", **options)
    assert torch.equal(resumed.q.P, whole.q.P)
    assert torch.equal(resumed.q.h, whole.q.h)
    for a, b in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)
    assert resumed.history == whole.history


def test_a_finished_run_is_not_repeated_and_another_is_refused(float64, tmp_path, monkeypatch):
    p = problem(n=40)
    whole = p.fit("variational", checkpoint=tmp_path / "state", **QUICK)
    with pytest.raises(ValueError, match="belongs to another run: its epochs is 6"):
        p.fit("variational", checkpoint=tmp_path / "state", **QUICK | {"epochs": 7})
    with pytest.raises(ValueError, match="belongs to another run: its hyperparameters is"):
        p.fit("variational", checkpoint=tmp_path / "state", **QUICK, seed=1)
    monkeypatch.setattr(Run, "_step", None)
    again = p.fit("variational", checkpoint=tmp_path / "state", **QUICK)
    assert torch.equal(again.q.P, whole.q.P)


def test_a_bar_shows_bound_and_rate(float64, capsys):
    problem(n=40).fit("variational", progress=True, **QUICK)
    shown = capsys.readouterr().err
    assert "bound -" in shown
    assert "points/s" in shown


# On disk


@pytest.mark.parametrize("likelihood", ["noise by output", "categorical"])
@pytest.mark.parametrize("options", [{}, {"mean": "linear"}, {"batch_size": None}, {"learn_inducing": True}])
def test_what_is_loaded_is_what_was_saved(likelihood, options, tmp_path, float64):
    p = Problem("cnn", likelihood, n=20)
    post = p.fit("variational", **QUICK | {"inducing": "greedy"} | options, weights=torch.rand(20) + 0.5)
    post.prior.precision = 0.7
    truth, bound = post.latent(p.x_new), post.log_evidence()
    post.save(tmp_path / "post")
    loaded = ntkgp.load(tmp_path / "post", p.net)
    found = loaded.latent(p.x_new)
    assert loaded._options == post._options
    assert torch.equal(loaded.q.P, post.q.P)
    assert_close(found.mean, truth.mean, rtol=1e-12, atol=0)
    assert_close(found.covariance_matrix, truth.covariance_matrix, rtol=1e-9, atol=1e-12)
    assert_close(loaded.log_evidence(), bound, rtol=1e-10, atol=0)
    loaded.prior.precision, post.prior.precision = 2.0, 2.0
    assert_close(loaded.latent(p.x_new).variance, post.latent(p.x_new).variance, rtol=1e-9, atol=1e-12)


def test_one_trained_on_a_loader_predicts_without_its_data(tmp_path, float64):
    p = problem()
    post = fit(p, loader_of(p), **QUICK | {"mean": "linear"})
    post.save(tmp_path / "post")
    loaded = ntkgp.load(tmp_path / "post", p.net)
    assert_close(loaded.latent(p.x_new).mean, post.latent(p.x_new).mean, rtol=1e-12, atol=0)
    assert_close(loaded.latent(p.x_new).variance, post.latent(p.x_new).variance, rtol=1e-9, atol=0)
