"""Running Kronecker curvature: its factors by hand, its draws and posterior against dense matrices, its state."""

import pytest
import torch
from autoencoding import NOISE, N, images, lae, parts, same, states
from cases import dense_jacobian
from torch import nn
from torch.testing import assert_close

import ntkgp
from ntkgp.curvature.kronecker import random_columns
from ntkgp.posteriors import GivenKroneckerPosterior, KroneckerPosterior
from ntkgp.posteriors.data import Data
from ntkgp.posteriors.model import LinearModel
from ntkgp.priors import Grouped
from ntkgp.training import LaplacianAutoencoder
from ntkgp.training.autoencoders.laplacian import _ONLINE, _POST_HOC


def kron(**options):
    return lae(**({"method": "kron"} | options))


def linear(**options):
    torch.manual_seed(3)
    encoder, decoder = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), nn.Linear(2, 4)
    noise = ntkgp.likelihoods.Gaussian(NOISE, learn_noise=False)
    return LaplacianAutoencoder(encoder.double(), decoder.double(), noise, **({"method": "kron"} | options))


def sums(objective):
    return {name: t.clone() for name, t in objective.curvatures.sums.named_buffers()}


def dense(objective):
    """H as a matrix, from the sums alone."""
    found, blocks = sums(objective), []
    for name, size in zip(objective.layout.names, objective.layout.sizes, strict=True):
        n, first, rest = (found.get(f"{kind}:{name}".replace(".", "/")) for kind in ("n", 0, 1))
        blocks.append(first if rest is None else torch.kron(first, rest / n))
        assert blocks[-1].shape == (size, size)
    return torch.block_diag(*blocks)


# H


@pytest.mark.parametrize("columns", [1, 3])
def test_one_example_has_the_exact_blocks_of_its_columns(columns, float64):
    objective, x = linear(num_data=1, columns=columns, scale=1.0), torch.rand(1, 4)
    objective.update(x)
    generator = torch.Generator().manual_seed(_ONLINE)
    u = torch.randn(columns, 1, 4, generator=generator) / (NOISE * columns) ** 0.5
    J = dense_jacobian(objective.net.eval(), x, objective.layout.names)
    g = torch.einsum("snc,ncp->sp", u, J)
    blocks = [part.mT @ part for part in g.split(objective.layout.sizes, dim=1)]
    assert_close(dense(objective), torch.block_diag(*blocks), rtol=1e-9, atol=1e-12)


def test_the_factors_of_many_columns_are_those_of_all_outputs(float64):
    x, objective = images(), kron(columns=20_000)
    objective.update(x)
    lin = ntkgp.Linearization(objective.net, example=x)
    gaussian = ntkgp.likelihoods.Gaussian(NOISE)
    model = LinearModel(lin, Data(x, x.flatten(1)), gaussian)
    exact = KroneckerPosterior(model, ntkgp.priors.Isotropic(lin), gaussian)
    for name in objective.layout.names:
        G, A = exact._factors(name)
        found = objective.curvatures._blocks()[name]
        if found.A is not None:
            assert_close(found.A, A, rtol=1e-9, atol=1e-12)
        assert (found.G[0] - G).norm() < 0.05 * G.norm()


def test_a_pass_over_all_data_is_that_of_a_kronecker_posterior_with_the_same_columns(float64):
    x, objective = images(), kron(columns=2, num_data=None, prior_std=0.5)
    post = objective.post_hoc(x, batch_size=N)
    assert isinstance(post, GivenKroneckerPosterior)
    assert objective.num_data == N
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))  # in which the pass went
    lin = ntkgp.Linearization(objective.net, example=x)
    gaussian = ntkgp.likelihoods.Gaussian(NOISE)
    model = LinearModel(lin, Data(x[order], x[order].flatten(1)), gaussian)
    truth = KroneckerPosterior(model, ntkgp.priors.Isotropic(lin, 4.0), gaussian, num_samples=2, seed=_POST_HOC)
    found, expected = (p.latent(x[:3]).covariance_matrix for p in (post, truth))
    assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_batches_add_up(float64):
    x, whole, parted = images(), kron(num_data=N, seed=1), kron(num_data=N, seed=1)
    whole.post_hoc(x, batch_size=N)
    parted.post_hoc(x, batch_size=5)
    first, second = sums(whole), sums(parted)
    assert first.keys() == second.keys()
    assert first["n"] == second["n"] == N
    for name in ("1:encoder/0/weight", "1:decoder/0/weight", "1:decoder/4/weight"):  # inputs are not random
        assert_close(first[name], second[name], rtol=1e-9, atol=1e-12)


def test_every_sum_is_forgotten_as_the_paper_says(float64):
    x, alpha = images(), 0.1
    first, second, both = (kron(alpha=alpha, scale=2.0) for _ in range(3))
    first.update(x[:5])
    second.updates.add_(1)  # the columns of a second step
    second.update(x[5:])
    both.update(x[:5])
    both.update(x[5:])
    for name, t in sums(both).items():
        assert_close(t, 0.9 * sums(first)[name] + sums(second)[name], rtol=1e-9, atol=1e-12)
    assert sums(both)["n"] == 2 * (0.9 * 5 + 7)


def test_the_calibrated_update_counts_all_data_from_the_first_step_on(float64):
    x, objective = images(), kron(alpha=0.3)
    inputs = []
    for part in (x[:4], x[4:]):
        objective.update(part)
        inputs.append(torch.nn.functional.unfold(part, 3, padding=1).mT.flatten(0, 1))
    assert_close(objective.curvatures.sums["n"].item(), float(N))
    means = [a.mT @ a / len(a) for a in inputs]
    a = 0.3 / (1 - 0.7**2)
    found = objective.curvatures._blocks()["encoder.0.weight"].A
    assert_close(found, (1 - a) * means[0] + a * means[1], rtol=1e-9, atol=1e-12)


def test_random_columns_have_the_curvature_for_their_covariance(float64):
    f, y = torch.randn(1, 5), torch.tensor([2])
    R = ntkgp.likelihoods.Categorical().expand(y, f).R
    u = random_columns(R, 200_000, torch.Generator().manual_seed(0))[:, 0]
    p = f[0].softmax(0)
    truth = p.diag() - torch.outer(p, p)
    error = 5 * (2 / 200_000) ** 0.5 * truth.diagonal().max()
    assert_close(u.mT @ u, truth, rtol=0, atol=error.item())


def test_columns_do_not_repeat_draws_nor_each_other(float64, monkeypatch):
    x, objective = images(), kron(num_data=None)
    seen = []
    monkeypatch.setattr(
        "ntkgp.training.autoencoders.running_kronecker.random_columns",
        lambda *args: seen.append(random_columns(*args)) or seen[-1],
    )
    objective.post_hoc(x, batch_size=4)
    objective.fit(x, epochs=1, batch_size=4)
    noise = [torch.randn(5, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]  # of draws
    heads = [u.flatten()[:5] * NOISE**0.5 for u in seen] + noise
    assert len(seen) == 6
    assert torch.pdist(torch.stack(heads)).min() > 0.1


def test_layers_that_store_inputs_first_have_their_factors_in_that_order(float64):
    torch.manual_seed(0)
    decoder = nn.Sequential(nn.Unflatten(1, (2, 1, 1)), nn.ConvTranspose2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 4))
    objective = LaplacianAutoencoder(nn.Linear(4, 2).double(), decoder.double(), num_data=1, method="kron", scale=1.0)
    x = torch.rand(1, 4)
    objective.update(x)
    u = torch.randn(1, 1, 4, generator=torch.Generator().manual_seed(_ONLINE))
    J = dense_jacobian(objective.net.eval(), x, objective.layout.names)
    g = torch.einsum("snc,ncp->p", u, J)[objective.layout.slices["decoder.1.weight"]]
    at = objective.layout.slices["decoder.1.weight"]
    assert_close(dense(objective)[at, at], torch.outer(g, g), rtol=1e-9, atol=1e-12)


def test_a_compiled_encoder_has_the_curvature_of_the_eager_one(float64):
    x, eager = images(), kron()
    encoder, decoder = parts()
    noise = ntkgp.likelihoods.Gaussian(NOISE, learn_noise=False)
    compiled = LaplacianAutoencoder(torch.compile(encoder, backend="eager"), decoder, noise, N, method="kron")
    for objective in (eager, compiled):
        objective.update(x)
    assert_close(compiled.h, eager.h, rtol=1e-9, atol=1e-12)
    found, truth = (o.posterior(x).latent(x[:2]).covariance_matrix for o in (compiled, eager))
    assert_close(found, truth, rtol=1e-9, atol=1e-12)


class Tokens(nn.Module):
    """A weight that meets several inputs of an example."""

    def __init__(self):
        super().__init__()
        self.each, self.out = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.each(x).tanh().mean(1))


def test_a_layer_that_gradients_reach_later_starts_anew_as_a_product(float64):
    torch.manual_seed(0)
    decoder = nn.Linear(2, 8)
    nn.init.zeros_(decoder.weight)
    both = Tokens().double(), decoder.double()
    x = torch.rand(6, 4, 2)
    objective = LaplacianAutoencoder(*both, num_data=6, method="kron", scale=1.0)
    objective.update(x)
    assert objective.curvatures.sums["0:encoder.each.weight"].shape == (6, 6)  # positions are not known: a dense block
    nn.init.ones_(decoder.weight)
    objective.update(x)
    assert objective.curvatures.sums["0:encoder.each.weight"].shape == (3, 3)
    assert objective.curvatures.sums["n:encoder.each.weight"] == 6
    assert objective.curvatures.sums["n:decoder.weight"] > 11
    other = LaplacianAutoencoder(Tokens().double(), nn.Linear(2, 8).double(), num_data=6, method="kron", scale=1.0)
    other.load_state_dict(objective.state_dict())
    other.update(x)
    objective.update(x)
    assert same(states(objective), states(other))


def test_a_graph_that_was_not_probed_has_its_curvature_all_the_same(float64):
    torch.manual_seed(0)
    x = torch.rand(4, 2, 6).permute(2, 0, 1)  # examples last in memory: flattened in another way
    both = Tokens().double(), nn.Linear(2, 8).double()
    objective = LaplacianAutoencoder(*both, num_data=6, method="kron", scale=1.0)
    objective.update(x)
    u = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(_ONLINE))
    J = dense_jacobian(objective.net.eval(), x, objective.layout.names)
    g = torch.einsum("snc,ncp->np", u, J)
    blocks = [part.mT @ part for part in g.split(objective.layout.sizes, dim=1)]  # dense: no product is known of it
    assert_close(dense(objective), torch.block_diag(*blocks), rtol=1e-9, atol=1e-12)


# q


def test_draws_variances_and_posterior_are_those_of_the_dense_covariance(float64, tmp_path):
    objective, x = linear(num_data=6, prior_std=0.7, scale=1.0), torch.rand(6, 4)
    objective.update(x)
    covariance = torch.linalg.inv(dense(objective) + torch.eye(objective.layout.num_params) / 0.49)
    assert_close(objective.variances(), covariance.diagonal(), rtol=1e-9, atol=1e-12)
    H = torch.linalg.eigvalsh(dense(objective))
    assert_close(objective.h.sort().values, H.clamp(min=0), rtol=1e-8, atol=1e-10)
    L = torch.linalg.cholesky(covariance)
    drawn = [nn.utils.parameters_to_vector(net.parameters()) for net in objective.draws(3000)]
    z = torch.linalg.solve_triangular(L, (torch.stack(drawn) - objective.mean()).mT, upper=False)
    assert (z @ z.mT / 3000 - torch.eye(len(z))).abs().max() < 5 * (2 / 3000) ** 0.5
    post = objective.posterior(x)
    J = dense_jacobian(objective.net.eval(), x[:3], objective.layout.names)
    truth = J @ covariance @ J.mT
    assert_close(post.latent(x[:3]).covariance_matrix, truth, rtol=1e-8, atol=1e-12)
    assert_close(post.refine().latent(x[:3]).covariance_matrix, truth, rtol=1e-8, atol=1e-12)
    post.save(tmp_path / "q")
    loaded = ntkgp.load(tmp_path / "q", objective.net)
    assert type(loaded) is GivenKroneckerPosterior
    assert_close(loaded.latent(x[:3]).covariance_matrix, truth, rtol=1e-8, atol=1e-12)
    unasked = objective.posterior(x)
    objective.update(x)  # goes its way without its posteriors
    for old in (post, unasked):
        assert_close(old.latent(x[:3]).covariance_matrix, truth, rtol=1e-8, atol=1e-12)


def test_training_draws_from_spectra_that_are_not_older_than_allowed(float64):
    x, objective = images(), kron(every=2, alpha=0.5, prior_std=0.5)

    def kept_and_fresh():
        found = [objective.curvatures.covariances(objective.prior_std, fresh) for fresh in (False, True)]
        return [torch.cat([cov[name].diagonal(p) for name, p in sizes]) for cov in found]

    sizes = list(zip(objective.layout.names, objective.layout.sizes, strict=True))
    assert_close(objective.draw().var(), objective.prior_std[0].square() + objective.mean().var(), rtol=0.3, atol=0)
    for step in range(6):
        objective.update(x[step : step + 4])
        kept, fresh = kept_and_fresh()
        assert torch.equal(kept, fresh) == (step % 2 == 0)
    before = objective.state_dict()["curvatures.spectra.age"].item()
    list(objective.draws(2))
    objective.variances()
    assert objective.state_dict()["curvatures.spectra.age"].item() == before  # looking at q does not move training
    objective.post_hoc(x)
    kept, fresh = kept_and_fresh()
    assert torch.equal(kept, fresh)
    young = kron(every=50, alpha=1e-3, scale=1.0, prior_std=0.5)
    for _ in range(9):  # n grows by more than a tenth in each
        young.update(x)
        young.draw()
    assert young.curvatures.spectra["n"] == young.curvatures.sums["n"]


def test_draws_are_made_from_h_as_it_is(float64):
    x, objective = images(), kron(every=50, alpha=0.5, prior_std=0.5)
    objective.update(x)
    objective.draw()  # spectra are taken here
    objective.update(1000 * x)
    codes = torch.stack([nn.utils.parameters_to_vector(net.parameters()) for net in objective.draws(400)])
    assert_close(codes.var(0).sum(), objective.variances().sum(), rtol=0.1, atol=0)


def test_a_parameter_that_is_not_used_keeps_its_prior(float64):
    class Idle(nn.Linear):
        def __init__(self):
            super().__init__(4, 2)
            self.idle = nn.Parameter(torch.ones(3))

    objective = LaplacianAutoencoder(
        Idle().double(), nn.Linear(2, 4).double(), num_data=5, method="kron", prior_std=2.0
    )
    objective.update(torch.rand(5, 4))
    at = objective.layout.slices["encoder.idle"]
    assert_close(objective.variances()[at], torch.full((3,), 4.0))
    assert objective.h.shape == (objective.layout.num_params,)


def test_the_prior_moves_to_the_fixed_point_of_the_evidence(float64):
    x, objective = images(), kron(prior_std=3.0)
    post = objective.post_hoc(x)
    std = objective.tune()
    gamma = (objective.h / (objective.h + std**-2)).sum()
    assert_close(gamma, std**-2 * objective.mean().detach().square().sum(), rtol=1e-5, atol=0)
    assert_close(post.tune(at="map", method="fixed_point").prior.precision.item(), std**-2, rtol=1e-2, atol=0)


def test_deviations_by_name_are_precisions_by_parameter(float64):
    x, objective = images(), kron(prior_std={"encoder": 0.5, "decoder": 2.0}, num_data=None)
    post = objective.post_hoc(x)
    assert isinstance(post.prior, Grouped)
    s = torch.where(torch.tensor([n.startswith("encoder") for n in objective.layout.names]), 0.5, 2.0)
    assert_close(post.prior.precision.detach(), s.double() ** -2)
    covariance = torch.linalg.inv(dense(objective) + objective.prior_std.double().pow(-2).diag())
    J = dense_jacobian(objective.net.eval(), x[:2], objective.layout.names)
    assert_close(post.latent(x[:2]).covariance_matrix, J @ covariance @ J.mT, rtol=1e-8, atol=1e-12)


# State


def test_a_state_fits_an_objective_that_has_seen_nothing(float64):
    x, old, new = images(), kron(every=3), kron(every=3)
    for _ in range(2):
        old.update(x)
        old.draw()
    new.load_state_dict(old.state_dict())
    assert same(states(old), states(new))
    for objective in (old, new):
        objective.update(x[:5])
    assert same(states(old), states(new))
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    assert torch.equal(old.draw(generators[0]), new.draw(generators[1]))


def test_a_state_replaces_what_was_known_in_this_dtype(float64):
    x, objective = images(), kron()
    empty = {name: t.clone() for name, t in objective.state_dict().items()}
    objective.update(x)
    objective.draw()
    single = {name: t.float() if t.is_floating_point() else t for name, t in objective.state_dict().items()}
    objective.load_state_dict(empty)
    assert same(states(objective), empty)
    assert_close(objective.variances(), torch.ones(objective.layout.num_params))
    objective.load_state_dict(single)
    assert all(t.dtype == torch.float64 for t in objective.curvatures.buffers() if t.is_floating_point())
    assert objective.posterior(x).latent(x[:2]).covariance_matrix.dtype == torch.float64
    with pytest.raises(RuntimeError, match=r"Unexpected key.*curvatures\.sums\.h"):
        objective.load_state_dict(lae().state_dict())


def test_what_batches_do_not_use_is_forgotten_too(float64):
    objective = kron(alpha=0.25, scale=1.0)
    objective.update(images())
    before = sums(objective)
    new = {name: t for name, t in before.items() if "decoder" not in name}
    objective.curvatures.move({name.replace("/", "."): t for name, t in new.items()}, 0.75, 1.0)
    assert_close(sums(objective)["0:decoder/0/bias"], 0.75 * before["0:decoder/0/bias"])
    objective.curvatures.take({name.replace("/", "."): t for name, t in new.items()})
    assert "0:decoder/0/bias" not in sums(objective)


def test_before_any_data_the_posterior_is_the_prior(float64):
    x, objective = images(), kron(prior_std=0.5)
    J = dense_jacobian(objective.net.eval(), x[:2], objective.layout.names)
    post = objective.posterior(x)
    assert_close(post.latent(x[:2]).covariance_matrix, J @ J.mT / 4, rtol=1e-9, atol=1e-12)
    assert post._log_det() == 0


@pytest.mark.parametrize("method", ["kron", "exact"])
def test_curvature_that_was_given_follows_the_noise(method, float64):
    x, objective = images(), lae(method=method)
    objective.likelihood = ntkgp.likelihoods.Gaussian(NOISE)
    objective.post_hoc(x)
    post = objective.posterior(x)
    post.likelihood.noise = 3 * NOISE
    H = dense(objective) if method == "kron" else objective.h.diag()
    covariance = torch.linalg.inv(H / 3 + torch.eye(len(H)))
    J = dense_jacobian(objective.net.eval(), x[:2], objective.layout.names)
    assert_close(post.latent(x[:2]).covariance_matrix, J @ covariance @ J.mT, rtol=1e-8, atol=1e-12)
    value = post.log_evidence(at="map")
    (slope,) = torch.autograd.grad(value, post.likelihood.raw_noise)
    residual = (x.flatten(1) - objective.net(x)).square().sum().detach()
    gamma = len(H) - covariance.trace()
    assert_close(slope.squeeze(), (residual / (3 * NOISE) - 16 * N + gamma) / 2, rtol=1e-8, atol=0)


def test_curvature_that_cannot_follow_a_likelihood_says_so(float64):
    encoder, mean = parts()
    noise = ntkgp.likelihoods.Gaussian(torch.full((16,), NOISE))
    objective = LaplacianAutoencoder(encoder, mean, noise, method="kron")
    post = objective.post_hoc(images())
    with torch.no_grad():
        assert torch.isfinite(post.log_evidence(at="map"))
    with pytest.raises(NotImplementedError, match="does not follow the hyperparameters of Gaussian"):
        post.log_evidence(at="map")


def test_training_lowers_the_loss():
    objective = kron(num_data=None, alpha=0.01)
    post = objective.fit(images(200), epochs=40, batch_size=50, lr=1e-2)
    first, last = (objective.history[i]["loss"] for i in (1, -1))
    assert last < first - 0.5
    assert isinstance(post, GivenKroneckerPosterior)


def test_bad_input_is_named():
    encoder, decoder = parts()
    for options, message in (
        ({"columns": 0}, "columns must be a whole number from 1 on, but is 0"),
        ({"every": 2.5}, r"every must be a whole number from 1 on, but is 2\.5"),
        ({"bound": 4}, "bound must be None for method='kron', but is 4"),
        ({"columns": 2, "method": "exact"}, "columns must be None for method='exact', but is 2"),
    ):
        with pytest.raises(ValueError, match=message):
            LaplacianAutoencoder(encoder, decoder, **({"method": "kron"} | options))
    x, objective = images(), kron()
    post = objective.post_hoc(x)
    blocks = post._statistics()
    for wrong, message in (
        ({"nothing": blocks["decoder.0.bias"]}, "blocks names 'nothing', which is not a parameter"),
        (
            {"decoder.0.weight": blocks["decoder.0.bias"]},
            r"blocks\['decoder\.0\.weight'\] must be for 16 numbers, but is",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            GivenKroneckerPosterior.of(post.model, post.prior, post.likelihood, wrong)
