"""Mixtures of posteriors: means of densities, and the disagreement of members in the variance."""

import math

import pytest
import torch
from problems import FOUR, Problem
from torch.testing import assert_close

import ntkgp
from ntkgp.posteriors import Mixture


def members(observation, K=3):
    """Posteriors of one problem around different networks."""
    problem, found = Problem("mlp", observation), []
    for k in range(K):
        torch.manual_seed(k)
        for p in problem.net.parameters():
            torch.nn.init.normal_(p)
        problem.lin = ntkgp.Linearization(problem.net, example=problem.x)
        found.append(problem.fit("full"))
    return problem, found


@pytest.mark.parametrize("observation", FOUR, ids=lambda o: o.name)
def test_densities_are_means_over_members_and_variances_hold_their_disagreement(observation, float64):
    problem, posts = members(observation.name)
    mixed = Mixture(posts).predict(problem.x_new, num_samples=2000)
    own = [
        post.predict(problem.x_new, num_samples=2000, generator=torch.Generator().manual_seed(k))
        for k, post in enumerate(posts)
    ]
    means = torch.stack([p.mean for p in own])
    spread = ((means - means.mean(0)) ** 2).sum(0) / 3
    assert_close(mixed.mean, means.sum(0) / 3)
    assert_close(mixed.epistemic, sum(p.epistemic for p in own) / 3 + spread)
    assert_close(mixed.aleatoric, sum(p.aleatoric for p in own) / 3)
    assert_close(mixed.variance, mixed.epistemic + mixed.aleatoric, rtol=5e-3, atol=5e-4)
    assert_close(mixed.standard_error, sum(p.standard_error**2 for p in own).sqrt() / 3)
    y = observation.targets(5, 3)
    assert_close(mixed.log_prob(y).exp(), sum(p.log_prob(y).exp() for p in own) / 3)
    assert (spread > 1e-4).any()  # members differ, so that leaving their spread out would show


def test_probabilities_and_their_entropy(float64):
    problem, posts = members("categorical")
    mixed = Mixture(posts).predict(problem.x_new)
    assert_close(mixed.probs.sum(1), torch.ones(5))
    assert_close(mixed.entropy, -(mixed.probs * mixed.probs.log()).sum(1))
    assert (mixed.entropy > sum(p.entropy for p in mixed.parts) / 3).all()  # concavity


def test_members_that_are_one_are_the_one(float64):
    problem, (post,) = members("gaussian", K=1)
    mixed, own = Mixture([post] * 4).predict(problem.x_new), post.predict(problem.x_new)
    for what in ("mean", "epistemic", "aleatoric", "variance"):
        assert_close(getattr(mixed, what), getattr(own, what))
    y = torch.randn(5, 3)
    assert_close(mixed.log_prob(y), own.log_prob(y))
    with pytest.raises(AttributeError, match="closed form"):
        _ = mixed.entropy
    with pytest.raises(AttributeError, match="no class probabilities"):
        _ = mixed.probs


def test_samples_have_the_mixtures_moments(float64):
    problem, posts = members("gaussian")
    mixture, S = Mixture(posts), 30_000
    mixed = mixture.predict(problem.x_new)
    y = mixed.sample(S)
    assert y.shape == (S, 5, 3)
    assert ((y.mean(0) - mixed.mean).abs() < 5 * (mixed.variance / S).sqrt()).all()
    fourth = ((y - y.mean(0)) ** 4).mean(0)
    assert ((y.var(0) - mixed.variance).abs() < 5 * ((fourth - y.var(0) ** 2) / S).sqrt()).all()
    f = mixture.sample_functions(S)(problem.x_new)
    assert f.shape == (S, 5, 3)
    assert ((f.mean(0) - mixed.mean).abs() < 5 * (mixed.epistemic / S).sqrt()).all()
    fourth = ((f - f.mean(0)) ** 4).mean(0)
    assert ((f.var(0) - mixed.epistemic).abs() < 5 * ((fourth - f.var(0) ** 2) / S).sqrt()).all()


def test_one_function_is_one_members(float64):
    problem, posts = members("gaussian")
    f = Mixture(posts).sample_functions(1)(problem.x_new)
    assert f.shape == (1, 5, 3)
    assert_close(Mixture(posts).sample_functions(1)(problem.x_new), f, rtol=0, atol=0)  # seeds repeat


def test_tuning_and_refinement_go_member_by_member(float64):
    problem, posts = members("categorical", K=2)
    mixture = Mixture(posts)
    before = [post.log_evidence(at="map").item() for post in posts]
    assert mixture.tune(at="map", steps=3, progress=False) is mixture
    assert all(post.log_evidence(at="map").item() > was for post, was in zip(posts, before, strict=True))
    refined = mixture.refine()
    assert all(torch.equal(r.shift, p.refine().shift) for r, p in zip(refined.posteriors, posts, strict=True))
    y = problem.y[:5]
    densities = torch.stack([p.log_prob(y) for p in refined.predict(problem.x[:5]).parts])
    assert_close(refined.predict(problem.x[:5]).log_prob(y), densities.logsumexp(0) - math.log(2))


def test_what_cannot_be_mixed_is_named(float64):
    _, (gaussian,) = members("gaussian", K=1)
    _, (categorical,) = members("categorical", K=1)
    with pytest.raises(ValueError, match="at least one"):
        Mixture([])
    with pytest.raises(TypeError, match="not a Linear"):
        Mixture([gaussian, torch.nn.Linear(3, 3)])
    with pytest.raises(ValueError, match="Categorical with 3 outputs, Gaussian with 3 outputs"):
        Mixture([gaussian, categorical])
    with pytest.raises(ValueError, match="n must be at least 1"):
        Mixture([gaussian]).sample_functions(0)
    with pytest.raises(ValueError, match="n must be at least 1"):
        Mixture([gaussian]).predict(torch.randn(2, 3)).sample(0)


def test_validation_data_choose_one_factor_by_the_mixtures_density(float64):
    _, posts = members("categorical")
    for post in posts:
        post.prior.precision = post.prior.precision * torch.rand(()).add(0.5)
    start = [post.prior.precision.detach().clone() for post in posts]
    torch.manual_seed(0)
    x, y = torch.randn(30, 3), torch.randint(3, (30,))
    grid, scores = torch.logspace(-2, 2, 9), []
    for factor in grid:
        for post, precision in zip(posts, start, strict=True):
            post.prior.precision = precision * factor
        fresh = [post.predict(x, generator=torch.Generator().manual_seed(0)).log_prob(y) for post in posts]
        scores.append((torch.stack(fresh).logsumexp(0) - math.log(3)).mean())
    for post, precision in zip(posts, start, strict=True):
        post.prior.precision = precision
    Mixture(posts).tune(validation=(x, y), grid=grid, progress=False)
    best = grid[torch.stack(scores).argmax()]
    assert 0 < torch.stack(scores).argmax() < 8  # neither end, where any rule would stop
    for post, precision in zip(posts, start, strict=True):
        assert_close(post.prior.precision, precision * best)
        assert_close(torch.tensor([h["validation_log_prob"] for h in post.history[-9:]]), torch.stack(scores))


def test_a_mixture_that_cannot_be_tuned_stays_as_it_was(float64):
    problem, posts = members("categorical")
    before = [post.prior.precision.detach().clone() for post in posts]
    posts[2].predict = posts[2]._memory = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        Mixture(posts).tune(validation=(problem.x, problem.y), progress=False)
    assert all(torch.equal(post.prior.precision, p) for post, p in zip(posts, before, strict=True))


def test_members_before_one_that_cannot_be_tuned_stay_as_they_were(float64):
    _, posts = members("categorical")
    before = [post.prior.precision.detach().clone() for post in posts]
    posts[2]._tune_by_evidence = lambda **_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        Mixture(posts).tune(at="map", steps=2, progress=False)
    assert all(torch.equal(post.prior.precision, p) for post, p in zip(posts, before, strict=True))


def test_sparse_members_are_tuned_and_refined_in_their_own_way(float64):
    problem = Problem("mlp", "categorical")
    posts = [problem.fit("variational", num_inducing=4, epochs=2, seed=k, progress=False) for k in range(2)]
    before = [post.prior.precision.detach().clone() for post in posts]
    mixture = Mixture(posts).tune(steps=2, progress=False)
    assert all((post.prior.precision != p).any() for post, p in zip(posts, before, strict=True))
    assert mixture.refine(epochs=1).predict(problem.x_new).probs.shape == (5, 3)


def test_a_mixture_moves_like_a_module_and_keeps_its_dtype():
    problem, posts = members("categorical")
    mixture = Mixture(posts)
    single = mixture.predict(problem.x_new)
    f = mixture.sample_functions(4)(problem.x_new)
    assert {t.dtype for t in (single.mean, single.variance, single.epistemic, single.entropy, f)} == {torch.float32}
    double = mixture.double().predict(problem.x_new.double())
    assert double.mean.dtype == double.log_prob(problem.y[:5]).dtype == torch.float64
    assert (single.mean - double.mean).abs().max() < 0.1  # other draws
