"""From q(f) to p(y): moments, densities, links, samples."""

import math

import pytest
import torch
from problems import FOUR, Problem
from torch.testing import assert_close

from ntkgp.posteriors.prediction import Latent, predictive_of


def predicted(likelihood, **options):
    problem = Problem("mlp", likelihood)
    post = problem.fit("function")
    return problem, post, post.predict(problem.x_new, **options)


@pytest.mark.parametrize("observation", FOUR, ids=lambda o: o.name)
def test_sampled_moments_and_densities_are_those_of_the_latent(observation, float64):
    problem, post, prediction = predicted(observation.name, link="mc", num_samples=20000)
    q = post.latent(problem.x_new)
    f = q.sample(torch.Size([20000]))
    mean, variance = post.likelihood.moments(f)
    error = (mean.var(0) / 20000 + prediction.standard_error**2).sqrt()
    assert ((prediction.mean - mean.mean(0)).abs() <= 5 * error).all()
    assert_close(prediction.epistemic, mean.var(0), rtol=0.15, atol=1e-3)
    assert_close(prediction.aleatoric, variance.mean(0), rtol=0.1, atol=1e-3)
    y = post.likelihood.validate(observation.targets(5, 3), 3).to(f.dtype if observation.name != "categorical" else int)
    density = post.likelihood.log_prob(y, f).logsumexp(0) - math.log(20000)
    assert_close(prediction.log_prob(y), density, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("observation", FOUR, ids=lambda o: o.name)
def test_variance_is_epistemic_plus_aleatoric(observation, float64):
    _, _, prediction = predicted(observation.name, num_samples=4000)
    assert (prediction.epistemic >= 0).all()
    assert (prediction.aleatoric >= 0).all()
    assert_close(prediction.variance, prediction.epistemic + prediction.aleatoric, rtol=1e-3, atol=1e-4)


def test_gaussian_predictions_are_exact(float64):
    problem, post, prediction = predicted("noise by output")
    q = post.latent(problem.x_new)
    noise = post.likelihood.noise.detach()
    assert_close(prediction.mean, q.mean)
    assert_close(prediction.variance, q.variance + noise)
    total = torch.distributions.MultivariateNormal(q.mean, q.covariance_matrix + torch.diag(noise))
    y = torch.randn(5, 3)
    assert_close(prediction.log_prob(y), total.log_prob(y))
    assert_close(prediction.entropy, total.entropy())
    assert not prediction.standard_error.any()
    with pytest.raises(AttributeError, match="no class probabilities"):
        _ = prediction.probs


def test_a_prediction_stays_what_it_was_when_the_noise_changes(float64):
    _, post, prediction = predicted("gaussian")
    y = torch.randn(5, 3)
    density, entropy, draws = prediction.log_prob(y), prediction.entropy, prediction.sample(3)
    post.likelihood.noise = 7.0
    assert_close(prediction.log_prob(y), density)
    assert_close(prediction.entropy, entropy)
    assert_close(prediction.sample(3), draws)


def test_probabilities_and_their_entropy(float64):
    _, _, prediction = predicted("categorical")
    assert_close(prediction.probs.sum(-1), torch.ones(5))
    assert_close(prediction.entropy, -(prediction.probs * prediction.probs.log()).sum(-1))
    y = torch.tensor([0, 1, 2, 0, 1])
    assert_close(prediction.log_prob(y), prediction.probs[torch.arange(5), y].log(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("likelihood", "link"), [("categorical", "probit"), ("categorical", "bridge"), ("bernoulli", "probit")]
)
def test_closed_links_agree_with_their_own_density(likelihood, link, float64):
    _problem, _post, prediction = predicted(likelihood, link=link)
    y = torch.randint(0, 2, (5, 3)) if likelihood == "bernoulli" else torch.tensor([0, 1, 2, 0, 1])
    p = prediction.probs
    truth = (
        (y * p.log() + (1 - y) * (1 - p).log()).sum(-1) if likelihood == "bernoulli" else p[torch.arange(5), y].log()
    )
    assert_close(prediction.log_prob(y), truth)
    if link == "probit":
        with pytest.raises(AttributeError, match="gives probabilities only"):
            _ = prediction.epistemic


def test_pixels_have_probabilities_of_their_own(float64):
    _, _, prediction = predicted("pixels", link="probit")
    assert_close(prediction.probs.view(5, 3, 2).sum(1), torch.ones(5, 2))


def test_the_map_predictive_is_the_network(float64):
    problem, _post, prediction = predicted("categorical", predictive="map")
    assert_close(prediction.probs, problem.net(problem.x_new).softmax(-1).detach())
    assert not prediction.epistemic.any()


def test_the_bnn_predictive_pushes_weights_through_the_network(float64):
    problem, post, prediction = predicted("categorical", predictive="bnn", num_samples=50)
    theta = post.sample_weights(50, torch.Generator().manual_seed(0))
    probs = torch.stack(
        [
            torch.func.functional_call(problem.net, problem.lin.layout.split(row), problem.x_new).softmax(-1)
            for row in theta
        ]
    ).mean(0)
    assert_close(prediction.probs, probs.detach())


def test_predictions_repeat(float64):
    problem, post, prediction = predicted("categorical")
    assert torch.equal(post.predict(problem.x_new).probs, prediction.probs)
    other = post.predict(problem.x_new, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(other.probs, prediction.probs)


@pytest.mark.parametrize("observation", FOUR, ids=lambda o: o.name)
def test_samples_of_y_have_the_predicted_mean(observation, float64):
    _, _post, prediction = predicted(observation.name, num_samples=8000)
    y = prediction.sample(8000)
    if observation.name == "categorical":
        y = torch.nn.functional.one_hot(y.squeeze(-1), 3)
    y = y.to(prediction.mean)
    error = (y.var(0) / 8000 + prediction.standard_error**2).sqrt()
    assert ((y.mean(0) - prediction.mean).abs() <= 5 * error).all()


def test_batches_do_not_change_predictions(float64, monkeypatch):
    problem, post, prediction = predicted("gaussian")
    monkeypatch.setattr("ntkgp.posteriors.base._PREDICT_BYTES", 1)
    assert_close(post.predict(problem.x_new).variance, prediction.variance)
    assert_close(post.latent(problem.x_new).mean, prediction.mean)


def test_joint_latents_take_leading_dimensions(float64):
    problem = Problem("cnn", "gaussian")
    post = problem.fit("function")
    x = torch.stack([problem.x_new, problem.x[:5]])
    both = post.latent(x, joint=True)
    assert both.batch_shape == (2,)
    for i in range(2):
        one = post.latent(x[i], joint=True)
        assert_close(both.mean[i], one.mean)
        assert_close(both.covariance_matrix[i], one.covariance_matrix)


def test_joint_latents_agree_with_single_ones(float64):
    problem = Problem("mlp", "categorical")
    post = problem.fit("function")
    single, joint = post.latent(problem.x_new), post.latent(problem.x_new, joint=True)
    blocks = joint.covariance_matrix.view(5, 3, 5, 3)[torch.arange(5), :, torch.arange(5)]
    assert_close(blocks, single.covariance_matrix)
    assert_close(joint.mean, single.mean)


def test_a_singular_latent_can_be_sampled(float64):
    covariance = torch.ones(1, 2, 2)  # rank one
    f = Latent(torch.zeros(1, 2), covariance).draw(1000, 0)
    assert_close(f[..., 0], f[..., 1])
    assert f.var().item() == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"predictive": "gp"}, 'predictive must be "glm", "bnn" or "map", but is \'gp\''),
        ({"link": "logit"}, "link must be one of"),
        ({"num_samples": 0}, "num_samples must be at least 1, but is 0"),
    ],
)
def test_unknown_ways_to_predict_are_named(options, match, float64):
    problem = Problem()
    with pytest.raises(ValueError, match=match):
        problem.fit("function").predict(problem.x_new, **options)


def test_targets_must_fit_the_predicted_points(float64):
    _, _, prediction = predicted("categorical")
    with pytest.raises(ValueError, match="y has 2 points, but 5 were predicted"):
        prediction.log_prob(torch.tensor([0, 1]))


def test_a_generator_of_latents_is_enough(float64):
    likelihood = FOUR[2].make()
    latents = (Latent(torch.zeros(2, 3), torch.eye(3).expand(2, 3, 3)) for _ in range(2))
    prediction = predictive_of(likelihood, latents, None, 100, torch.Generator().manual_seed(0))
    assert prediction.probs.shape == (4, 3)
