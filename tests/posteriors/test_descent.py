"""The mode by minibatches, against Newton's method."""

import pytest
import torch
from problems import Problem
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import ntkgp
from ntkgp import priors

TIGHT = {"rtol": 1e-8, "atol": 1e-10}
QUICK = {"solver": "descent", "epochs": 30, "batch_size": 16}


def problem(likelihood="categorical", prior="grouped", network="cnn", n=120):
    return Problem(network, likelihood, prior, n=n).informed(1.5)


def gap(post, truth, delta):
    """How far ψ is from its maximum, beside what was to gain."""
    gained = truth._log_joint(delta) - truth._log_joint(torch.zeros_like(delta))
    possible = truth._log_joint(truth.linear_mode().delta) - truth._log_joint(torch.zeros_like(delta))
    return (1 - gained / possible).item()


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical", "poisson", "bernoulli", "pixels"])
@pytest.mark.parametrize("method", ["function", "kron"])
def test_it_comes_close_to_the_mode(method, likelihood, float64):
    p = problem(likelihood)
    post, truth = p.fit(method), p.fit("full")
    refined = post.refine(**QUICK)
    assert gap(post, truth, refined.shift) < 0.02
    exact = truth._gradient_at(refined.shift, truth.model.f() + truth.model.push(refined.shift.unsqueeze(0))[0])
    assert refined.certificate.gradient_norm == pytest.approx(post.prior.whiten(exact).norm().item(), rel=1e-8)
    assert refined.certificate.steps >= 30 * 8
    assert refined.latent(p.x_new).mean.dtype == torch.float64


@pytest.mark.parametrize("prior", ["isotropic", "around the map", "diagonal"])
def test_any_prior_will_do(prior, float64):
    p = problem(prior=prior)
    assert gap(None, p.fit("full"), p.fit("function").search(**QUICK).delta) < 0.02


def test_a_prior_over_filters_will_do_too(float64):
    p = problem()
    p.make_prior = lambda: priors.ConvFilterGP(p.lin, 0.7, 1.3)
    assert gap(None, p.fit("full"), p.fit("function").search(**QUICK).delta) < 0.02


def test_a_subset_is_refined_on_all_data_and_keeps_its_covariance(float64):
    p = problem()
    truth = p.fit("full")
    post = p.fit("function", subset=30)
    refined = post.refine(data=(p.x, p.y), **QUICK)
    assert gap(post, truth, refined.shift) < 0.02
    assert gap(post, truth, post.refine().shift) > 0.02
    assert len(refined.model.data) == 30
    moved = p.fit("function", subset=30)._at(refined.shift)
    assert_close(
        refined.latent(p.x_new).covariance_matrix, moved.latent(p.x_new).covariance_matrix, rtol=1e-8, atol=1e-12
    )


@pytest.mark.parametrize("weights", ["points", "none"])
def test_weights_count(weights, float64):
    p = problem()
    w = torch.arange(120) % 3 + 0.0 if weights == "points" else None
    truth = p.fit("full", weights=w)
    assert gap(None, truth, p.fit("function", weights=w).search(**QUICK).delta) < 0.02


def test_loaders_are_shuffled_in_an_order_of_the_seed(float64):
    p = problem()
    found = []
    for shuffle in (False, True):
        loader = DataLoader(TensorDataset(p.x, p.y), batch_size=16, shuffle=shuffle)
        post = ntkgp.fit(p.lin, loader, p.make_likelihood(), "kron", p.make_prior())
        found.append(post.search(solver="descent", epochs=30).delta)
        assert gap(post, p.fit("full"), found[-1]) < 0.02
    assert_close(*found, **TIGHT)
    other = post.search(solver="descent", epochs=30, seed=1).delta
    assert not torch.allclose(other, found[0], rtol=1e-4)


def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(float64, tmp_path, monkeypatch):
    from ntkgp.posteriors.descent import Run

    p = problem()
    post = p.fit("kron")
    options = {"solver": "descent", "epochs": 4, "batch_size": 16, "checkpoint": tmp_path / "state"}
    whole = post.search(solver="descent", epochs=4, batch_size=16)
    epoch = Run._epoch

    def die(self, state, number, rate):
        if number == 2:
            raise KeyboardInterrupt
        return epoch(self, state, number, rate)

    monkeypatch.setattr(Run, "_epoch", die)
    with pytest.raises(KeyboardInterrupt):
        post.search(**options)
    monkeypatch.undo()
    resumed = post.search(**options)
    assert torch.equal(resumed.delta, whole.delta)
    assert resumed.certificate == whole.certificate
    with pytest.raises(ValueError, match="belongs to another run: its epochs is 4"):
        post.search(**options | {"epochs": 5})


def test_a_rate_that_is_too_large_is_lowered(float64, monkeypatch):
    from ntkgp.posteriors.descent import Run

    p = problem("poisson")
    monkeypatch.setattr(Run, "_first_rate", lambda self: 1e3)
    assert gap(None, p.fit("full"), p.fit("function").search(**QUICK).delta) < 0.1


def test_a_rate_that_is_never_small_enough_ends_at_the_start(float64, monkeypatch):
    from ntkgp.posteriors.descent import Run

    p = problem("poisson")
    monkeypatch.setattr(Run, "_first_rate", lambda self: 1e30)
    at_mode = p.fit("full").refine()
    again = at_mode.refine(**QUICK)
    assert torch.equal(again.shift, at_mode.shift)
    assert again.certificate.converged


def test_a_heavy_point_is_no_explosion(float64, monkeypatch):
    """Weights multiply log p; what is a small loss for many points must not slow the descent down."""
    from ntkgp.posteriors.descent import Run

    p, epochs = problem(), []
    epoch = Run._epoch
    monkeypatch.setattr(Run, "_epoch", lambda self, *args: epochs.append(1) or epoch(self, *args))
    post = p.fit("kron", weights=torch.full((120,), 50.0))
    post.search(solver="descent", epochs=5, batch_size=16)
    assert len(epochs) == 5


def test_a_descent_that_ends_below_its_start_returns_the_start(float64):
    p = problem()
    at_mode = p.fit("full").refine()
    with pytest.warns(UserWarning, match="1 epochs of descent ended .* nats below their start"):
        again = at_mode.refine(solver="descent", epochs=1, batch_size=2)
    assert torch.equal(again.shift, at_mode.shift)
    assert again.certificate.converged


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "magic"}, 'solver must be "newton" or "descent", but is \'magic\''),
        ({"solver": "descent", "epochs": 0}, "epochs must be at least 1, but is 0"),
        ({"solver": "descent", "batch_size": 0}, "batch_size must be at least 1, but is 0"),
        ({"solver": "descent", "tolerance": 0.0}, "tolerance must be positive, but is 0.0"),
    ],
)
def test_options_that_cannot_be_are_named(options, message, float64):
    with pytest.raises(ValueError, match=message):
        Problem().fit("function").refine(**options)


@pytest.mark.filterwarnings("ignore:the mode of the linear model gains")
@pytest.mark.parametrize(("likelihood", "spread"), [("gaussian", 3.0), ("categorical", 6.0)])
def test_the_fixed_point_takes_modes_by_minibatches(likelihood, spread, float64):
    p = Problem("mlp", likelihood, "isotropic", n=120).informed(spread)
    truth = p.fit("kron").tune(method="fixed_point", steps=100)
    search = {"solver": "descent", "epochs": 30, "batch_size": 40}
    post = p.fit("kron").tune(method="fixed_point", steps=15, search=search)
    assert_close(post.prior.precision, truth.prior.precision, rtol=0.05, atol=0)
    with pytest.raises(ValueError, match='search is for method="fixed_point"'):
        post.tune(search=search)
