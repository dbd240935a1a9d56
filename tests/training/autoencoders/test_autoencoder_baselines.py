"""Plain, learned-variance, dropout, variational autoencoders and ensembles: their losses by hand, and their draws."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import ntkgp
from ntkgp.training.autoencoders import (
    AutoencoderEnsemble,
    DropoutAutoencoder,
    Heads,
    PlainAutoencoder,
    VariationalAutoencoder,
    imputed,
    reconstructed,
)


def encoder(out=2, dropout=False):
    hidden = [nn.Linear(6, 5), nn.Tanh()] + ([nn.Dropout(0.4)] if dropout else [])
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(5, out)).to(torch.get_default_dtype())


def decoder(dropout=False):
    hidden = [nn.Linear(2, 5), nn.Tanh()] + ([nn.Dropout(0.4)] if dropout else [])
    return nn.Sequential(*hidden, nn.Linear(5, 6)).to(torch.get_default_dtype())


def images(n=8):
    return torch.rand(n, 1, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.get_default_dtype())


def plain(seed=0):
    torch.manual_seed(seed)
    return PlainAutoencoder(encoder(), decoder(), seed=seed)


def two_heads():
    return PlainAutoencoder(encoder(), Heads(decoder(), decoder()), "heteroscedastic")


def variational(**options):
    return VariationalAutoencoder(
        Heads(encoder(), encoder()), Heads(decoder(), decoder()), "heteroscedastic", **options
    )


ALL = {
    "plain": plain,
    "learned variance": two_heads,
    "dropout": lambda: DropoutAutoencoder(encoder(dropout=True), decoder(dropout=True)),
    "variational": variational,
    "ensemble": lambda: AutoencoderEnsemble([plain(seed) for seed in range(3)]),
}


@pytest.mark.parametrize("name", ALL)
def test_all_answer_the_same_questions_and_repeat_themselves(name):
    model = ALL[name]()
    model.fit(images(), epochs=2, batch_size=4)
    found, again = reconstructed(model, images(), 20), reconstructed(model, images(), 20)
    assert torch.equal(found.log_prob, again.log_prob)
    assert found.mean.shape == found.variance.shape == found.noise.shape == (8, 6)
    assert (found.variance.sum() > 0) == (name in ("dropout", "variational", "ensemble"))
    assert (found.code_variance.sum() > 0) == (name in ("dropout", "variational", "ensemble"))
    assert (found.noise.var(0).sum() > 0) == (name in ("learned variance", "variational"))
    assert imputed(model, images(), torch.tensor([True, False, True]), 2, 2, 2).isfinite().all()


@pytest.mark.parametrize("name", ["dropout", "variational"])
def test_a_run_that_goes_on_equals_one_that_was_not_stopped(name, tmp_path):
    torch.manual_seed(0)
    runs = []
    for epochs in ((3,), (1, 3)):
        torch.manual_seed(0)
        start = ALL[name]().state_dict()
        for n in epochs:
            model = ALL[name]()
            model.load_state_dict(start)
            model.fit(images(), epochs=n, batch_size=3, checkpoint=tmp_path / str(len(epochs)))
        runs.append(model.state_dict())
    assert all(torch.equal(a, runs[1][key]) for key, a in runs[0].items())


def test_the_plain_loss_is_the_squared_error_with_weight_decay(float64):
    torch.manual_seed(0)
    model = PlainAutoencoder(encoder(), decoder(), num_data=100, prior_std=0.5)
    x = images()
    square = (x.flatten(1) - model.net(x)).square().sum(1).mean() / 2 + 3 * math.log(2 * math.pi)
    decay = sum(p.square().sum() for p in model.net.parameters()) / 0.25 / 2 / 100
    assert_close(model.loss(x), square + decay)


def test_the_variational_loss_is_the_bound_by_hand(float64):
    torch.manual_seed(0)
    model, x = variational(num_data=100, kl_weight=0.3, prior_std=1e6), images()
    mean, log_variance = model.net.encoder(x).chunk(2, 1)
    noise = torch.randn(8, 2, generator=torch.Generator().manual_seed(2))
    f = model.net.decoder(mean + log_variance.exp().sqrt() * noise)
    mu, s = f.chunk(2, 1)
    log_prob = torch.distributions.Normal(mu, (s / 2).exp()).log_prob(x.flatten(1)).sum(1).mean()
    q = torch.distributions.Normal(mean, (log_variance / 2).exp())
    p = torch.distributions.Normal(torch.zeros_like(mean), 1.0)
    kl = torch.distributions.kl_divergence(q, p).sum(1).mean()
    loss = model.loss(x, generator=torch.Generator().manual_seed(2))
    assert_close(loss, 0.3 * kl - log_prob, rtol=1e-9, atol=1e-9)


def test_codes_of_the_variational_autoencoder_have_the_moments_it_says(float64):
    torch.manual_seed(0)
    model, x = variational(), images()
    found = reconstructed(model, x, 3000)
    mean, log_variance = (part.detach() for part in model.net.distribution(x))
    assert_close(found.code_variance / log_variance.exp(), torch.ones(8, 2), rtol=0, atol=0.15)
    assert ((found.code - mean).abs() < 5 * (log_variance.exp() / 3000).sqrt()).all()


def test_dropout_stays_on_and_leaves_the_global_generator_alone():
    model = ALL["dropout"]()
    model.net.eval()
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    found = reconstructed(model, images(), 5)
    assert torch.equal(torch.rand(1), expected)
    assert found.variance.min() > 0
    assert not any(module.training for module in model.net.modules())


def test_an_ensemble_is_the_mixture_of_its_members(float64):
    members = [plain(seed) for seed in range(3)]
    x = images()
    found = reconstructed(AutoencoderEnsemble(members), x, 100)
    f = torch.stack([member.net(x) for member in members]).detach()
    assert_close(found.mean, f.mean(0))
    assert_close(found.variance, f.var(0, correction=0), rtol=1e-9, atol=1e-12)


def test_the_mean_network_of_a_variational_autoencoder_ends_in_a_posterior():
    model = variational()
    post = model.fit(images(), epochs=1)
    with torch.no_grad():
        assert_close(post.predict(images(), predictive="map").mean, model.net.eval()(images())[:, :6])


def test_members_have_files_of_their_own(tmp_path):
    ensemble = AutoencoderEnsemble([plain(seed) for seed in range(2)])
    ensemble.fit(images(), epochs=1, checkpoint=tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["member-0", "member-1"]
    weights = [nn.utils.parameters_to_vector(member.net.parameters()) for member in ensemble.members]
    assert not torch.equal(*weights)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="encoder and decoder must have dropout layers"):
        DropoutAutoencoder(encoder(), decoder())
    with pytest.raises(ValueError, match="kl_weight must be positive, but is 0"):
        variational(kl_weight=0.0)
    with pytest.raises(ValueError, match="members must be at least one"):
        AutoencoderEnsemble([])
    with pytest.raises(ValueError, match="members must have a likelihood that is not learnt"):
        AutoencoderEnsemble([PlainAutoencoder(encoder(), decoder(), ntkgp.likelihoods.Gaussian(1.0))])
    with pytest.raises(ValueError, match="encoder must return an even number"):
        VariationalAutoencoder(encoder(3), decoder(), num_data=8).loss(images())
