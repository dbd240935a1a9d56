"""What one asks of autoencoders, with draws that are known: moments, likelihoods, scores, imputation, neighbours."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import ntkgp
from ntkgp.training import LaplacianAutoencoder
from ntkgp.training.autoencoders import (
    CodeNeighbours,
    codes,
    decoded,
    generated,
    imputed,
    ood_scores,
    reconstructed,
)


class Scaled:
    """Encodes by a factor, decodes by another."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def encode(self, x):
        return self.a * x[:, :2]

    def decode(self, z):
        return self.b * torch.cat([z, z.sum(1, keepdim=True)], 1)


class Few:
    """Three networks, and never more."""

    def __init__(self, noise=0.5, factors=((1.0, 2.0), (0.5, 1.0), (2.0, 0.3))):
        self.likelihood = ntkgp.likelihoods.Gaussian(noise, learn_noise=False)
        self.networks = [Scaled(a, b) for a, b in factors]

    def draws(self, n, generator=None):
        yield from self.networks[:n]


def test_moments_are_those_of_the_mixture_of_draws(float64):
    model, x = Few(), torch.randn(1100, 3)
    found = reconstructed(model, x, 100)
    z = torch.stack([draw.encode(x) for draw in model.networks])
    f = torch.stack([draw.decode(draw.encode(x)) for draw in model.networks])
    assert_close(found.code, z.mean(0))
    assert_close(found.code_variance, z.var(0, correction=0), rtol=1e-9, atol=1e-12)
    assert_close(found.mean, f.mean(0))
    assert_close(found.variance, f.var(0, correction=0), rtol=1e-9, atol=1e-12)
    assert_close(found.noise, torch.full((1100, 3), 0.5))
    log_prob = -((x - f).square() / 0.5 + math.log(2 * math.pi * 0.5)).sum(-1) / 2
    assert_close(found.log_prob, log_prob.logsumexp(0) - math.log(3))
    assert_close(found.expected_log_prob, log_prob.mean(0))
    assert (found.log_prob >= found.expected_log_prob - 1e-12).all()
    assert_close(codes(model, x, 2), z[:2])
    some = decoded(model, z[0], 100)
    f = torch.stack([draw.decode(z[0]) for draw in model.networks])
    assert_close(some.mean, f.mean(0))
    assert_close(some.variance, f.var(0, correction=0), rtol=1e-9, atol=1e-12)


def test_small_variances_of_large_means_do_not_cancel():
    model = Few(factors=[(1.0, 1000.0), (1.0, 1000.1)])
    x = torch.ones(1, 3)
    assert_close(reconstructed(model, x).variance[0, 0], torch.tensor(0.0025), rtol=1e-2, atol=0)


def test_the_laplacian_autoencoder_has_the_variance_of_its_linear_model_where_weights_are_sure(float64):
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(3, 2).double(), nn.Linear(2, 3).double()
    lae = LaplacianAutoencoder(encoder, decoder, num_data=5, method="exact", prior_std=0.01)
    x = torch.randn(5, 3)
    post = lae.post_hoc(x)
    found = reconstructed(lae, x, 1000)
    assert_close(found.mean, lae.net(x).detach(), rtol=0, atol=0.01)
    truth = post.latent(x).variance
    assert_close(found.variance / truth, torch.ones_like(truth), rtol=0, atol=5 * (2 / 1000) ** 0.5)
    v = lae.layout.split(lae.variances())
    truth = x.square() @ v["encoder.weight"].mT + v["encoder.bias"]
    assert_close(found.code_variance / truth, torch.ones_like(truth), rtol=0, atol=5 * (2 / 1000) ** 0.5)
    again = reconstructed(lae, x, 50, torch.Generator().manual_seed(1))
    assert torch.equal(again.mean, reconstructed(lae, x, 50, torch.Generator().manual_seed(1)).mean)


def test_scores_are_larger_for_what_is_strange(float64):
    model = Few()
    inside, outside = (reconstructed(model, factor * torch.randn(200, 3)) for factor in (1.0, 5.0))
    own, strange = ood_scores(inside, inside), ood_scores(outside, inside)
    assert list(own) == ["latent variance", "output variance", "likelihood", "typicality"]
    for name in own:
        assert ntkgp.report.metrics.ood_auc(own[name], strange[name]) > 0.8
    assert_close(own["latent variance"], inside.code_variance.sum(1))
    assert_close(own["output variance"], inside.variance.sum(1) + 3 * 0.5)
    assert_close(own["likelihood"], -inside.log_prob)
    assert_close(strange["typicality"], (outside.log_prob - inside.log_prob.mean()).abs())


# Imputation


class Pulls:
    """Decodes to the nearer one of two modes, a little beside it; the code is the mean of the pixels."""

    def __init__(self, offset):
        self.offset = offset

    def encode(self, x):
        return x.flatten(1).mean(1, keepdim=True)

    def decode(self, z):
        return ((z > 0.5).to(z) + self.offset).expand(-1, 4)


class TwoModes:
    def __init__(self):
        self.likelihood = ntkgp.likelihoods.Gaussian(1.0)
        self.asked = 0

    def draws(self, n, generator=None):
        for _ in range(n):
            self.asked += 1
            yield Pulls(0.02 if self.asked % 2 else -0.02)


def test_imputation_keeps_what_was_observed_and_shows_modes(float64):
    x = torch.tensor([[[[0.5, 9.0], [9.0, 9.0]]]]).expand(50, -1, -1, -1)
    observed = torch.tensor([[True, False], [False, False]])
    model = TwoModes()
    found = imputed(model, x, observed, num_samples=8, refinements=2, steps=3)
    assert found.shape == (8, 50, 1, 2, 2)
    assert (found[..., 0, 0] == 0.5).all()
    missing = found[..., ~observed]
    assert_close(missing, missing.round(), rtol=0, atol=1e-12)  # the second stage averages the offsets away
    assert 0.3 < missing.mean() < 0.7  # noise decides between the modes
    assert model.asked == 8 * (3 + 2)
    assert torch.equal(found, imputed(TwoModes(), x, observed, num_samples=8, refinements=2, steps=3))


def test_what_is_missing_is_not_looked_at(float64):
    observed, x = torch.tensor([True, False, False]), torch.rand(4, 3)
    other = torch.where(observed, x, torch.nan)
    assert torch.equal(imputed(Few(), x, observed), imputed(Few(), other, observed))


def test_new_images_come_from_noise(float64):
    images = generated(TwoModes(), 30, torch.zeros(1, 2, 2), refinements=2)
    assert images.shape == (30, 1, 2, 2)
    assert images.dtype == torch.float64
    assert set(images.round().flatten().tolist()) == {0.0, 1.0}


# Neighbours


class Jitter:
    def __init__(self, noise):
        self.noise = noise

    def encode(self, x):
        return x[:, :2] + self.noise

    def decode(self, z):
        return z


class Jittered:
    """Codes with noise of its own for each draw, and none without a spread."""

    def __init__(self, spread):
        self.spread, self.likelihood = spread, ntkgp.likelihoods.Gaussian(1.0)

    def draws(self, n, generator=None):
        generator = generator or torch.Generator().manual_seed(0)
        for _ in range(n if self.spread else 1):
            yield Jitter(self.spread * torch.randn(2, generator=generator))


def test_neighbours_find_classes_by_their_codes():
    centres = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    y = torch.arange(3).repeat(20)
    x = torch.cat([centres[y] + 0.3 * torch.randn(60, 2), torch.randn(60, 5)], 1)
    for model in (Jittered(0.0), Jittered(0.1)):
        found = CodeNeighbours(model, x[:6], y[:6], num_samples=20)
        assert (found.predict(x[6:]) == y[6:]).float().mean() > 0.95
    single = CodeNeighbours(Jittered(0.0), x[:3], y[:3])
    assert single.k == 1
    assert single.predict(x[3:]).tolist() == y[3:].tolist()


def test_the_number_of_neighbours_is_chosen_by_cross_validation():
    y = torch.arange(2).repeat(60)
    x = torch.stack([y + 0.7 * torch.randn(120), torch.zeros(120)], 1)
    assert CodeNeighbours(Jittered(0.0), x, y).k > 1  # classes overlap


def test_bad_input_is_named():
    model, x = Few(), torch.rand(4, 3)
    with pytest.raises(ValueError, match="num_samples must be at least 1, but is 0"):
        reconstructed(model, x, 0)
    with pytest.raises(ValueError, match="there must be at least one input"):
        reconstructed(model, x[:0])
    with pytest.raises(TypeError, match=r"observed must be boolean, but has dtype torch\.float32"):
        imputed(model, x, torch.ones(4, 3))
    with pytest.raises(ValueError, match="steps must be at least 1, but is 0"):
        imputed(model, x, torch.ones(3).bool(), steps=0)
    with pytest.raises(ValueError, match=r"observed must have the shape of x, \(4, 3\), or one that broadcasts"):
        imputed(model, x, torch.ones(5).bool())
    with pytest.raises(ValueError, match="y must hold 4 classes"):
        CodeNeighbours(model, x, torch.zeros(4))
