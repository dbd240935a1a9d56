"""The linearised reconstruction against dense Gaussian algebra."""

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

import ntkgp
from ntkgp.inverse import DeepImagePrior, RayTransform, UNet, linearized, reconstruct, total_variation, train
from ntkgp.inverse.predcp import ExpectedVariation
from ntkgp.inverse.priors import PRIORS
from ntkgp.priors import Diagonal, Kronecker

SIZE = 8


class Dense:
    """The same model from J and S₀ as matrices."""

    def __init__(self, rec) -> None:
        lin, prior, z = rec.pixels, rec.posterior.prior, rec._z
        self.J, self.S0 = lin.jacobian(z)[0], prior.covariance().to_dense()
        n = rec.shape.numel()
        self.A = rec.A(torch.eye(n).view(n, *rec.shape)).flatten(1).mT
        self.f, self.theta, self.noise = lin(z)[0], lin.theta, rec.posterior.likelihood.noise
        self.mu = self.f + self.J @ (prior.mean - self.theta)
        self.K = self.J @ self.S0 @ self.J.mT
        self.Syy = self.A @ self.K @ self.A.mT + self.noise * torch.eye(len(self.A))

    @property
    def covariance(self) -> Tensor:
        return self.K - self.K @ self.A.mT @ torch.linalg.solve(self.Syy, self.A @ self.K)


@pytest.fixture
def measurement(float64):
    A = RayTransform.parallel(SIZE, 4)
    x = torch.zeros(1, 1, SIZE, SIZE)
    x[..., 2:6, 3:6] = 0.7
    y = A(x)
    return A, x, y + 0.05 * torch.randn_like(y)


def network(**options) -> UNet:
    torch.manual_seed(1)
    return UNet(channels=3, scales=2, skip=2, **options)


def rec_of(measurement, **options):
    A, _, y = measurement
    defaults = {"steps": 50, "rate": 1e-2, "tune": None, "noise": 0.01}
    return reconstruct(A, y, network(), **defaults | options)


def assert_gradients_are_differences(value, module) -> None:
    """Hold every entry of every hyperparameter to central differences."""
    for name, p in module.named_parameters():
        (g,) = torch.autograd.grad(value(), p)
        for i in range(p.numel()):
            values = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    p.view(-1)[i] += step
                values.append(value().item())
                with torch.no_grad():
                    p.view(-1)[i] -= step
            assert g.view(-1)[i].item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=2e-5, abs=2e-6), name


@pytest.mark.parametrize("prior", ["conv_filter", "iid", "g_prior"])
def test_covariance_evidence_and_refined_mean_are_those_of_the_dense_model(measurement, prior):
    rec = rec_of(measurement, prior=prior)
    dense, y = Dense(rec), measurement[2].flatten()
    assert_close(rec.covariance(), dense.covariance, rtol=1e-8, atol=1e-12)
    assert_close(rec.std.flatten(), dense.covariance.diagonal().sqrt(), rtol=1e-8, atol=0)
    patch = torch.tensor([3, 9, 20])
    assert_close(rec.covariance(patch), dense.covariance[patch][:, patch], rtol=1e-8, atol=1e-12)
    evidence = MultivariateNormal(dense.A @ dense.mu, dense.Syy).log_prob(y)
    assert_close(rec.log_evidence(), evidence, rtol=1e-9, atol=0)
    assert_close(rec.mean.flatten(), dense.f)
    gain = dense.K @ dense.A.mT @ torch.linalg.solve(dense.Syy, y - dense.A @ dense.mu)
    refined = rec.refine()
    assert_close(refined.mean.flatten(), dense.mu + gain, rtol=1e-7, atol=1e-9)
    assert_close(refined.covariance(), dense.covariance, rtol=1e-8, atol=1e-12)


def test_only_convolution_weights_are_random(measurement):
    rec = rec_of(measurement)
    assert all(name.endswith("weight") for name in rec.pixels.layout.names)
    assert rec.pixels.layout == rec.posterior.lin.layout


def test_evidence_gradients_agree_with_differences_for_every_hyperparameter(measurement):
    rec = rec_of(measurement, noise=None, tune=None)
    assert_gradients_are_differences(rec.log_evidence, rec.posterior)


def test_steps_of_tuning_are_linear_algebra_only(measurement, monkeypatch):
    rec = rec_of(measurement, noise=None, steps=800)

    def refuse(*args):
        raise AssertionError("the network was differentiated again")

    rec.log_evidence()
    for lin in (rec.pixels, rec.posterior.lin):
        for name in ("jvp", "vjp", "features", "value_and_jvp"):
            monkeypatch.setattr(lin, name, refuse)
    rec.posterior.tune(steps=3)
    assert rec.posterior.history[-1]["log_evidence"] > rec.posterior.history[0]["log_evidence"] + 1


@pytest.mark.parametrize("prior", [Diagonal, Kronecker])
def test_any_prior_will_do(measurement, prior):
    rec = rec_of(measurement, prior=prior)
    dense, y = Dense(rec), measurement[2].flatten()
    assert_close(rec.covariance(), dense.covariance, rtol=1e-8, atol=1e-12)
    assert_close(rec.log_evidence(), MultivariateNormal(dense.A @ dense.mu, dense.Syy).log_prob(y), rtol=1e-9, atol=0)


def test_a_model_of_another_dtype_is_that_model(measurement):
    rec = rec_of(measurement)
    exact = rec.posterior.image_covariance().clone()
    single = copy.deepcopy(rec.posterior).float()
    assert single.image_covariance().dtype == torch.float32
    rounding = 1e-6 * rec.posterior.K(rec.posterior.prior).diagonal().max().item()  # of what is subtracted
    assert_close(single.image_covariance().double(), exact, rtol=0, atol=rounding)
    assert rec.posterior.image_covariance().dtype == torch.float64


def test_samples_have_the_covariance_and_the_mean(measurement):
    rec = rec_of(measurement)
    draws = rec.sample(4000, torch.Generator().manual_seed(0)).flatten(1)
    S, Sigma = len(draws), rec.covariance()
    variance = Sigma.diagonal()
    error = ((variance[:, None] * variance + Sigma**2) / S).sqrt()
    assert ((draws.mean(0) - rec.mean.flatten()).abs() <= 5 * (variance / S).sqrt()).all()
    assert ((draws.T.cov() - Sigma).abs() <= 5 * error).all()


def test_draws_of_the_prior_have_its_covariance(measurement):
    rec = rec_of(measurement)
    K, S = Dense(rec).K, 4000
    draws = rec.sample_prior(S, torch.Generator().manual_seed(0)).flatten(1)
    variance = K.diagonal()
    assert ((draws.mean(0) - rec.mean.flatten()).abs() <= 5 * (variance / S).sqrt()).all()
    assert ((draws.T.cov() - K).abs() <= 5 * ((variance[:, None] * variance + K**2) / S).sqrt()).all()


def test_columns_are_squared_one_by_one_or_by_signs(measurement, monkeypatch):
    from ntkgp.inverse import priors

    rec = rec_of(measurement)
    lin = rec.posterior.lin
    exact = lin.jacobian(rec._z)[0].square().sum(0)
    assert_close(priors.squared_columns(lin), exact)
    assert_close(PRIORS["g_prior"](lin, rec.dip.net).scale, 1 / exact.clamp(min=1e-10 * exact.max()))
    monkeypatch.setattr(priors, "_EXACT", 1)
    monkeypatch.setattr(priors, "_PROBES", 4096)
    estimate = priors.squared_columns(lin)
    assert ((estimate - exact).abs() <= 6 * (2 / 4096) ** 0.5 * exact).all()


def test_equal_layers_get_different_draws(measurement):
    rec = rec_of(measurement, prior="iid")
    theta = rec.pixels.layout.split(rec.posterior.sample_weights(2) - rec.pixels.theta)
    equal = [v for v in theta.values() if v.shape[1:] == (3, 3, 3, 3)]
    assert len(equal) >= 2
    assert (equal[0] - equal[1]).abs().min() > 0
    assert (equal[0][0] - equal[0][1]).abs().min() > 0


def test_the_log_likelihood_is_that_of_independent_patches(measurement):
    rec, x = rec_of(measurement), measurement[1][0]
    whole = MultivariateNormal(rec.mean.flatten(), rec.covariance()).log_prob(x.flatten()) / SIZE**2
    assert rec.log_likelihood(x, patch=SIZE) == pytest.approx(whole.item(), rel=1e-8)
    single = torch.distributions.Normal(rec.mean, (rec.std**2 + 0.01).sqrt()).log_prob(x).mean()
    assert rec.log_likelihood(x, noise=0.01) == pytest.approx(single.item(), rel=1e-9)
    numbers, total = torch.arange(SIZE * SIZE).view(SIZE, SIZE), 0.0
    for rows in numbers.split(3):  # 3 + 3 + 2 on a side
        for which in (part.flatten() for part in rows.split(3, dim=1)):
            Sigma = rec.covariance()[which][:, which]
            total += MultivariateNormal(rec.mean.flatten()[which], Sigma).log_prob(x.flatten()[which])
    assert rec.log_likelihood(x, patch=3) == pytest.approx(total.item() / SIZE**2, rel=1e-8)


def test_tuning_raises_the_evidence_and_learns_noise(measurement):
    rec = rec_of(measurement, noise=None, steps=800)
    before = rec.log_evidence().item()
    tuned = rec_of(measurement, noise=None, tune="evidence", tuning_steps=30, steps=800)
    assert tuned.log_evidence().item() > before + 1
    assert tuned.posterior.likelihood.noise.item() != rec.posterior.likelihood.noise.item()
    given = rec_of(measurement, noise=0.02, tune="evidence", tuning_steps=5, steps=800)
    assert given.posterior.likelihood.noise.item() == pytest.approx(0.02)


def test_draws_after_the_evidence_asked_for_constant_filters(float64):
    A = RayTransform.parallel(SIZE, 4)
    x = torch.zeros(1, 1, SIZE, SIZE)
    x[..., 2:6, 3:6] = 0.7
    torch.manual_seed(0)
    y = A(x) + 0.05 * torch.randn(1, 1, 4, 12)
    rec = reconstruct(A, y, UNet(channels=4, scales=2), steps=60, rate=1e-2, tune=None)
    rec.posterior.prior.lengthscale = 1e17
    assert rec.sample(2).isfinite().all()


# Without matrices


def test_samples_without_matrices_agree_with_the_dense_model(measurement):
    rec = rec_of(measurement, method="sampled", prior="iid", num_samples=2000, sketch=30, tolerance=1e-8)
    Sigma, S = Dense(rec).covariance, 2000
    variance = Sigma.diagonal()
    error = ((variance[:, None] * variance + Sigma**2) / S).sqrt()
    assert ((rec.covariance() - Sigma).abs() <= 5 * error).all()
    assert_close(rec.std.flatten() ** 2, rec.covariance().diagonal())
    patch = torch.tensor([3, 9, 20])
    assert_close(rec.covariance(patch), rec.covariance()[patch][:, patch])
    exact = rec_of(measurement, method="exact", prior="iid")
    assert_close(rec.refine().mean, exact.refine().mean, rtol=1e-5, atol=1e-7)
    draws = rec.sample(3)
    assert draws.shape == (3, 1, SIZE, SIZE)
    assert isinstance(rec.refine(), type(rec))


def test_em_without_matrices_ends_where_the_exact_evidence_is_stationary(measurement):
    options = {"prior": "layerwise", "noise": None, "steps": 800}
    rec = rec_of(measurement, method="sampled", tune="evidence", tuning_steps=60, num_samples=400, sketch=40, **options)
    exact = rec_of(measurement, method="exact", **options)
    exact.posterior.tune(method="fixed_point", steps=60)
    precisions = [r.posterior.prior.precision.detach().log() for r in (rec, exact)]
    relevant = exact.posterior.effective_parameters() > 0.5
    assert_close(precisions[0][relevant], precisions[1][relevant], rtol=0, atol=0.1)
    assert_close(rec.posterior.likelihood.noise, exact.posterior.likelihood.noise, rtol=0.1, atol=0)


def test_single_precision_sees_what_double_does(measurement):
    A, _, y = measurement
    dip = train(A, y, network(), A.fbp(y), steps=50, rate=1e-2)
    single = DeepImagePrior(copy.deepcopy(dip.net).float(), dip.z.float(), dip.losses, dip.step)
    options = {"tune": None, "noise": 0.01, "method": "sampled", "prior": "iid", "num_samples": 20}
    double = linearized(dip, A, y, tolerance=1e-10, sketch=40, **options)
    for sketch in (0, 40):
        found = linearized(single, copy.deepcopy(A).float(), y.float(), tolerance=1e-4, sketch=sketch, **options)
        assert found.std.dtype == found.mean.dtype == found.sample(2).dtype == torch.float32
        assert_close(found.std.double(), double.std, rtol=5e-3, atol=1e-5)
        assert_close(found.mean.double(), double.mean, rtol=1e-4, atol=1e-5)
        assert_close(found.refine().mean.double(), double.refine().mean, rtol=5e-3, atol=1e-3)


def test_the_evidence_without_matrices_is_that_of_the_dense_model(measurement):
    rec = rec_of(measurement, method="sampled", prior="iid", num_samples=400, sketch=30, tolerance=1e-8)
    dense, y = Dense(rec), measurement[2].flatten()
    truth = MultivariateNormal(dense.A @ dense.mu, dense.Syy).log_prob(y).item()
    assert rec.log_evidence().item() == pytest.approx(truth, abs=2.5 * rec.posterior.log_det().standard_error.item())


def test_a_network_far_from_its_mode_is_told_of(measurement):
    with pytest.warns(UserWarning, match="nats a target over the network itself"):
        rec = rec_of(measurement, noise=None, tune="evidence", steps=3)
    dense, y = Dense(rec), measurement[2].flatten()
    mode = dense.mu + dense.K @ dense.A.mT @ torch.linalg.solve(dense.Syy, y - dense.A @ dense.mu)
    squares = [(y - dense.A @ image).square().sum() for image in (dense.f, mode)]
    gain = (squares[0] - squares[1]) / (2 * dense.noise)
    assert rec.posterior._gain_at_mode() == pytest.approx(gain.item(), rel=1e-4)


def test_variances_lost_to_rounding_are_zero_and_told_of(measurement, monkeypatch):
    rec = rec_of(measurement, prior="iid")
    lost = rec.covariance().clone()
    lost[3, 3] = lost[40, 40] = -1e-12
    monkeypatch.setattr(rec.posterior, "image_covariance", lambda: lost)
    with pytest.warns(UserWarning, match="the variances of 2 of 64 pixels"):
        std = rec.std.flatten()
    assert (std == 0).nonzero().flatten().tolist() == [3, 40]
    assert_close(std[4], lost[4, 4].sqrt())


def test_a_reconstruction_of_a_vector_has_a_log_likelihood(float64):
    M, net = torch.randn(5, 9), torch.nn.Sequential(torch.nn.Linear(9, 4), torch.nn.Tanh(), torch.nn.Linear(4, 9))
    x = torch.randn(9)
    rec = reconstruct(M, (M @ x).unsqueeze(0), net, steps=5, tune=None, noise=0.1)
    total = 0.0
    for which in torch.arange(9).split(4):  # runs of four, four and one
        Sigma = rec.covariance()[which][:, which]
        total += MultivariateNormal(rec.mean[which], Sigma).log_prob(x[which]).item()
    assert rec.log_likelihood(x, patch=4) == pytest.approx(total / 9, rel=1e-8)
    with pytest.raises(ValueError, match=r"total variation is for images \(..., H, W\), but A's have shape \(9,\)"):
        reconstruct(M, (M @ x).unsqueeze(0), method="tv", penalty=0.1)


# TV-PredCP


def test_expected_variation_has_its_closed_form_and_derivative(measurement):
    rec = rec_of(measurement)
    prior = rec.posterior.prior
    prior.variance = torch.rand(len(prior.blocks)) + 0.5
    prior.lengthscale = torch.rand(len(prior.filters)) + 0.5
    kappa = ExpectedVariation(prior, rec.posterior.K.atoms(prior), rec.mean[0])
    found = kappa(prior)
    dense, ends = Dense(rec), torch.tensor(prior.layout.sizes).cumsum(0).tolist()
    blocks = {n: slice(e - size, e) for n, e, size in zip(prior.layout.names, ends, prior.layout.sizes, strict=True)}
    assert len(prior.filters) == 3  # first, down and up
    for d, block in enumerate(prior.filters):
        columns = torch.cat([torch.arange(dense.J.shape[1])[blocks[name]] for name in prior.blocks[block]])
        J, S = dense.J[:, columns], dense.S0[columns][:, columns]
        root = torch.linalg.cholesky(S)
        draws = dense.f + torch.randn(4000, len(S)) @ root.mT @ J.mT
        tv = total_variation(draws.unflatten(1, (SIZE, SIZE)))
        assert abs(tv.mean() - found[0, d]) <= 5 * tv.std() / len(tv) ** 0.5
        ell = prior.lengthscale.detach().clone()
        values = []
        for step in (1e-5, -1e-5):
            moved = ell.clone()
            moved[d] *= math.exp(step)
            prior.lengthscale = moved
            values.append(kappa(prior)[0, d].item())
        prior.lengthscale = ell
        assert found[1, d].item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)


def test_predcp_adds_its_log_density_to_the_objective(measurement):
    from ntkgp.posteriors.tuning import Objective

    rec = rec_of(measurement, tune="predcp", tuning_steps=1, noise=None, steps=800)
    post, prior = rec.posterior, rec.posterior.prior
    objective = Objective(post, "linear_mode", post, {})
    kappa, slope = ExpectedVariation(prior, rec.posterior.K.atoms(prior), rec.mean[0])(prior)
    rate = prior.predcp.rate
    assert_close(objective(), post.log_evidence() + (slope.abs().log() - rate * kappa).sum(), rtol=1e-9, atol=0)
    assert_gradients_are_differences(objective, post)


# Bad input


def test_bad_input_is_named(measurement):
    _, x, y = measurement
    with pytest.raises(ValueError, match="noise must be positive"):
        rec_of(measurement, noise=0.0)
    with pytest.raises(ValueError, match=r"net must be given for images of shape \(9,\)"):
        reconstruct(torch.randn(4, 9), torch.randn(1, 4))
    rec = rec_of(measurement)
    with pytest.raises(ValueError, match=r"x must have the shape \(1, 8, 8\), but has \(1, 1, 8, 8\)"):
        rec.log_likelihood(x)
    with pytest.raises(ValueError, match="a reconstruction cannot be updated"):
        rec.posterior.update(rec._z, y.flatten(1))
    with pytest.raises(ValueError, match="a reconstruction cannot be saved"):
        rec.posterior.save("nowhere")
    assert ntkgp.reconstruct is reconstruct
