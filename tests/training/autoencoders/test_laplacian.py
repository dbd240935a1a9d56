"""The Laplacian autoencoder: its update by hand, its curvature and gradients against dense ones, its runs resumed."""

import json

import pytest
import torch
from autoencoding import NOISE, N, images, lae, parts, same, states
from cases import dense_jacobian
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import ntkgp
from ntkgp.posteriors import GivenDiagonalPosterior
from ntkgp.training import LaplacianAutoencoder
from ntkgp.training.autoencoders import Autoencoder, Heads


def dense_diagonal(objective, x):  # (P,)
    J = dense_jacobian(objective.net.eval(), x, objective.layout.names)
    return J.square().sum((0, 1)) / NOISE


# h


def test_the_update_is_that_of_the_paper_by_hand(float64):
    x, alpha = images(), 0.1
    objective = lae(alpha=alpha, scale=1.0, prior_std=0.5)
    first, second = dense_diagonal(objective, x[:5]), dense_diagonal(objective, x[5:])
    objective.update(x[:5])
    assert_close(objective.h, first, rtol=1e-9, atol=1e-12)
    objective.update(x[5:])
    assert_close(objective.h, 0.9 * first + second, rtol=1e-9, atol=1e-12)
    assert_close(objective.variances(), 1 / (0.9 * first + second + 4), rtol=1e-9, atol=1e-12)


def test_the_papers_update_settles_where_data_are_counted_c_over_alpha_times(float64):
    x, objective = images(), lae(alpha=0.5, scale=3.0)
    for _ in range(40):
        objective.update(x)
    assert_close(objective.h, 3 / 0.5 * dense_diagonal(objective, x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("alpha", [1e-4, 0.3, 1.0])
def test_the_calibrated_update_counts_all_data_once_from_the_first_step_on(alpha, float64):
    x, objective = images(), lae(alpha=alpha)
    truth = dense_diagonal(objective, x)
    for _ in range(3):
        objective.update(x)
        assert_close(objective.h, truth, rtol=1e-9, atol=1e-12)


def test_minibatches_stand_for_all_data(float64):
    x, objective = images(), lae(alpha=1e-9)
    for part in x.split(3):
        objective.update(part)
    assert_close(objective.h, dense_diagonal(objective, x), rtol=1e-6, atol=1e-12)
    objective.update(x[:3])  # five batches now, the first of them twice
    extra = 4 * dense_diagonal(objective, x[:3])
    assert_close(objective.h, (4 * dense_diagonal(objective, x) + extra) / 5, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("method", "bound"), [("approximate", None), ("mixed", 8), ("exact", None)])
def test_post_hoc_is_the_curvature_of_all_data(method, bound, float64):
    x, objective = images(), lae(method=method, bound=bound, num_data=None)
    post = objective.post_hoc(x, batch_size=5)
    gaussian = ntkgp.likelihoods.Gaussian(NOISE)
    parts = ntkgp.curvature.LayerwiseCurvature(objective.net.eval()).diagonal(
        x, lambda f: gaussian.expand(x.flatten(1), f).R, method, bound
    )
    truth = torch.cat([parts[name] for name in objective.layout.names])
    assert_close(objective.h, truth, rtol=1e-9, atol=1e-12)
    if method == "exact":
        assert_close(objective.h, dense_diagonal(objective, x), rtol=1e-9, atol=1e-12)
    assert objective.num_data == N
    assert isinstance(post, GivenDiagonalPosterior)
    draws = post.sample_weights(4000, torch.Generator().manual_seed(0))
    assert_close(draws.var(0) * (truth + 1), torch.ones_like(truth), rtol=0, atol=0.15)
    J = dense_jacobian(objective.net, x[:2], objective.layout.names)
    covariance = torch.einsum("ncp,p,ndp->ncd", J, 1 / (truth + 1), J)
    assert_close(post.latent(x[:2]).covariance_matrix, covariance, rtol=1e-8, atol=1e-12)


def test_after_a_pass_the_online_update_goes_on_from_it(float64):
    x, objective = images(), lae(alpha=0.25)
    objective.post_hoc(x)
    objective.update(x[:4])
    truth = 0.75 * dense_diagonal(objective, x) + 0.25 * 3 * dense_diagonal(objective, x[:4])
    assert_close(objective.h, truth, rtol=1e-9, atol=1e-12)


def test_a_decoder_of_variances_has_the_curvature_of_its_likelihood(float64):
    encoder, mean = parts()
    objective = LaplacianAutoencoder(encoder, Heads(mean, parts(2)[1]), "heteroscedastic", method="exact")
    x = images(3)
    J = dense_jacobian(objective.net.eval(), x, objective.layout.names)
    precision = torch.cat([(-objective.net(x)[:, 16:]).exp(), torch.full((3, 16), 0.5)], 1)
    objective.post_hoc(x)
    assert_close(objective.h, torch.einsum("ncp,nc->p", J.square(), precision), rtol=1e-9, atol=1e-12)


# The gradient


def test_the_gradient_is_that_at_a_drawn_network(float64):
    x, objective = images(), lae(prior_std=0.5, num_samples=2)
    objective.update(x)
    objective.loss(x[:4], generator=torch.Generator().manual_seed(3)).backward()
    found = objective.layout.join({name: p.grad for name, p in objective.weights().items()})
    theta, generator = objective.mean().detach(), torch.Generator().manual_seed(3)
    std = (dense_diagonal(objective, x) + 4) ** -0.5
    truth = theta / 0.25 / N
    for _ in range(2):
        drawn = Autoencoder(*parts()).eval()
        nn.utils.vector_to_parameters(theta + std * torch.randn(len(theta), generator=generator), drawn.parameters())
        J = dense_jacobian(drawn, x[:4], objective.layout.names)
        r = (x[:4].flatten(1) - drawn(x[:4])) / NOISE
        truth = truth - torch.einsum("ncp,nc->p", J, r.detach()) / 4 / 2
    assert_close(found, truth, rtol=1e-8, atol=1e-11)


def test_drawn_networks_have_the_moments_of_q(float64):
    objective = lae()
    objective.update(images())
    drawn = list(objective.draws(150))
    theta = torch.stack([nn.utils.parameters_to_vector(net.parameters()) for net in drawn])
    z = (theta - objective.mean()) / objective.variances().sqrt()
    assert z.mean().abs() < 5 / z.numel() ** 0.5
    assert abs(z.var() - 1) < 5 * (2 / z.numel()) ** 0.5
    assert not any(p.requires_grad for p in drawn[0].parameters())
    again = next(objective.draws(1))
    assert torch.equal(again.encode(images()), drawn[0].encode(images()))


def test_tied_weights_are_drawn_once(float64):
    encoder, decoder = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    decoder.weight = encoder.weight
    objective = LaplacianAutoencoder(encoder.double(), decoder.double(), num_data=4, method="exact")
    x = torch.rand(4, 3)
    objective.update(x)
    J = dense_jacobian(objective.net.eval(), x, objective.layout.names)
    assert_close(objective.h, J.square().sum((0, 1)), rtol=1e-9, atol=1e-12)
    drawn = next(objective.draws(1))
    assert drawn.encoder.weight is drawn.decoder.weight


# Runs


def test_a_loop_of_ones_own_does_what_fit_does(float64):
    x = images()
    ready, own = lae(alpha=0.1), lae(alpha=0.1)
    ready.fit(x, epochs=1, batch_size=N, lr=0.01)
    optimizer = torch.optim.Adam(own.parameter_groups(0.01))
    own.net.train()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    own.loss(x[order], generator=torch.Generator().manual_seed(0)).backward()
    own.update(x[order])
    optimizer.step()
    assert same(states(ready), states(own))


class Stopped(Exception):
    pass


@pytest.mark.parametrize("structure", [{"method": "mixed", "bound": 4}, {"method": "kron", "every": 3}])
@pytest.mark.parametrize("scale", ["calibrated", 1.0])
def test_a_run_that_goes_on_equals_one_that_was_not_stopped(scale, structure, tmp_path, monkeypatch):
    options = {"epochs": 4, "batch_size": 5, "lr": 1e-2, "milestones": (2,)}
    settings = {"scale": scale, "alpha": 0.05, "seed": 4} | structure
    whole = lae(**settings)
    whole.fit(images(), **options)
    monkeypatch.setattr("ntkgp.training.loop._EVERY", 2)
    stopped, calls = lae(**settings), iter(range(100))
    terms = stopped.terms
    stopped.terms = lambda *args: terms(*args) if next(calls) < 8 else (_ for _ in ()).throw(Stopped)
    with pytest.raises(Stopped):
        stopped.fit(images(), checkpoint=tmp_path / "run", **options)
    again = lae(**settings)
    again.fit(images(), checkpoint=tmp_path / "run", **options)
    assert same(states(again), states(whole))
    assert again.history == whole.history
    other = lae(**(settings | {"alpha": 0.06}))
    with pytest.raises(ValueError, match=r"belongs to another run: its alpha is 0\.05"):
        other.fit(images(), checkpoint=tmp_path / "run", **options)


def test_training_lowers_the_loss_and_ends_in_q():
    objective = lae(num_data=None, method="approximate", alpha=0.01)
    post = objective.fit(images(200), epochs=40, batch_size=50, lr=1e-2)
    first, last = (objective.history[i]["loss"] for i in (1, -1))
    assert last < first - 0.5
    assert objective.num_data == 200
    assert isinstance(post, GivenDiagonalPosterior)
    variances = post.sample_weights(2000, torch.Generator().manual_seed(0)).var(0)
    assert_close(variances / objective.variances(), torch.ones_like(variances), rtol=0, atol=0.25)


def test_tensors_datasets_and_loaders_with_or_without_labels_are_the_same_data(float64):
    x = images()
    labelled = TensorDataset(x, torch.zeros(N).long())
    sources = [x, (x, None), TensorDataset(x), labelled, DataLoader(labelled, 4), DataLoader(x, 4, shuffle=True)]
    found = []
    for source in sources:
        objective = lae(num_data=None)
        objective.post_hoc(source, batch_size=4)
        found.append(objective.h)
    for h in found[1:]:
        assert_close(h, found[0], rtol=1e-12, atol=0)
    objective = lae(num_data=None)
    objective.fit(DataLoader(labelled, 4, shuffle=True), epochs=1)
    assert objective.num_data == N


def test_batch_norm_keeps_its_statistics_while_curvature_is_found(float64):
    encoder, decoder = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), nn.Linear(2, 3)
    objective = LaplacianAutoencoder(encoder.double().train(), decoder.double().train(), num_data=5)
    before = encoder[1].running_mean.clone()
    objective.update(torch.rand(5, 3))
    assert torch.equal(encoder[1].running_mean, before)
    assert all(module.training for module in objective.net.modules() if module is not objective.net)


# The prior


def test_the_prior_moves_to_the_fixed_point_of_the_evidence(float64):
    x, objective = images(), lae(prior_std=3.0)
    post = objective.post_hoc(x)
    std = objective.tune()
    theta = objective.mean().detach()
    gamma = (objective.h / (objective.h + std**-2)).sum()
    assert_close(gamma, std**-2 * theta.square().sum(), rtol=1e-5, atol=0)
    assert_close(post.tune(at="map", method="fixed_point").prior.precision.item(), std**-2, rtol=1e-2, atol=0)
    assert_close(objective.posterior(x).prior.precision.item(), std**-2, rtol=1e-9, atol=0)


def test_bad_input_is_named():
    encoder, decoder = parts()
    for options, message in (
        ({"alpha": 0.0}, "alpha must be above 0 and at most 1, but is 0.0"),
        ({"scale": "data"}, "scale must be \"calibrated\" or a positive number, but is 'data'"),
        ({"scale": -1.0}, "scale must be"),
        ({"num_samples": 0}, "num_samples must be at least 1"),
        ({"method": "full"}, "method must be one of approximate, mixed, exact, kron, but is 'full'"),
        ({"method": "mixed"}, "bound must be a number"),
    ):
        with pytest.raises(ValueError, match=message):
            LaplacianAutoencoder(encoder, decoder, **options)
    with pytest.raises(TypeError, match=r"decoder must be a torch\.nn\.Module"):
        LaplacianAutoencoder(encoder, lambda z: z)
    with pytest.raises(ValueError, match="decoder must return 16 numbers for an input of 16, but returns 2"):
        LaplacianAutoencoder(encoder, nn.Linear(2, 2)).fit(images(), epochs=1)
    with pytest.raises(ValueError, match="decoder must return 2 times 16 numbers for an input of 16, but returns 16"):
        LaplacianAutoencoder(encoder, decoder, "heteroscedastic").post_hoc(images())
    with pytest.raises(ValueError, match="num_data is 5, but data have 12 points"):
        lae(num_data=5).post_hoc(images())
    with pytest.raises(TypeError, match="data must be X"):
        lae().post_hoc("images.npz")
    with pytest.raises(ValueError, match="num_data is not known"):
        lae(num_data=None).loss(images())
    with pytest.raises(ValueError, match="there is no curvature yet"):
        lae().tune()
    with pytest.raises(ValueError, match="tune needs one prior_std"):
        lae(prior_std={"encoder": 1.0, "decoder": 2.0}).tune()
    with pytest.raises(ValueError, match="NaN or infinity"):
        lae().post_hoc(images() * torch.nan)


def test_files_from_before_curvature_followed_the_noise_are_read(tmp_path, float64):
    x, objective = images(), lae()
    post = objective.post_hoc(x)
    post.save(tmp_path / "q")
    meta = json.loads((tmp_path / "q/posterior.json").read_text())
    (tmp_path / "q/posterior.json").write_text(json.dumps(meta | {"version": 2}))
    tensors = load_file(tmp_path / "q/tensors.safetensors")
    save_file(tensors | {"statistics": objective.h.unsqueeze(0)}, tmp_path / "q/tensors.safetensors")
    loaded = ntkgp.load(tmp_path / "q", objective.net)
    found, truth = (q.latent(x[:2]).covariance_matrix for q in (loaded, post))
    assert_close(found, truth, rtol=1e-9, atol=1e-12)
