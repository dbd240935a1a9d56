"""What a reconstruction decides, and refuses, before it trains anything."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from ntkgp.inverse import RayTransform, UNet, linearized, reconstruct, train
from ntkgp.inverse.priors import PRIORS
from ntkgp.inverse.setting import _atoms, exact_bytes, random_parameters, settled
from ntkgp.priors import Isotropic

FOREVER = 10**9  # steps of training that no test waits for
SIZE = 8


@pytest.fixture
def measurement(float64):
    A = RayTransform.parallel(SIZE, 4)
    x = torch.zeros(1, 1, SIZE, SIZE)
    x[..., 2:6, 3:6] = 0.7
    y = A(x)
    return A, y + 0.05 * torch.randn_like(y)


def network(**options) -> UNet:
    torch.manual_seed(1)
    return UNet(channels=4, scales=2, skip=2, **options)


@pytest.mark.parametrize("prior", ["conv_filter", "iid", "layerwise", "g_prior"])
def test_atoms_are_counted_as_there_are(measurement, prior):
    A, y = measurement
    net = network()
    rec = linearized(train(A, y, net, A.fbp(y), steps=1), A, y, prior, tune=None)
    assert _atoms(net, random_parameters(net), prior) == len(rec.posterior.prior.atoms)


def test_auto_counts_the_jacobian_and_a_gram_matrix_for_every_atom(measurement):
    small, large = RayTransform.parallel(28, 20, 41), RayTransform.parallel(128, 60)
    default, narrow = UNet(), UNet(channels=8)
    parameters = random_parameters(default)
    P, atoms = 76_608, _atoms(default, parameters, "conv_filter")
    expected = 8 * (784 * P + (atoms + 4) * (784**2 + 820**2))
    assert exact_bytes(small, default, parameters, "conv_filter") == expected

    def exact(A, net) -> bool:
        return settled(A, net, None, "evidence", "auto", None, 1e-5, {}).exact

    assert exact(small, default)
    assert not exact(large, narrow)  # its Jacobian is small, its Gram matrices are not


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tune": "map"}, ValueError, "tune must be one of evidence, predcp or None, but is 'map'"),
        ({"prior": "flat"}, ValueError, "prior must be one of .* or a function, but is 'flat'"),
        ({"method": "fast"}, ValueError, "method must be one of .*, but is 'fast'"),
        ({"noise": -1.0}, ValueError, "noise must be positive, but is -1.0"),
        ({"bogus": 3}, TypeError, "options must be among .*num_samples.*, but there is bogus"),
        ({"method": "exact", "num_samples": 3}, TypeError, 'options are for method="sampled", .* there is num_samples'),
        ({"tune": "predcp", "method": "sampled"}, ValueError, "the prior is layerwise and the method sampled"),
        ({"tune": "predcp", "prior": "iid"}, ValueError, "the prior is iid and the method exact"),
        ({"tune": "predcp", "penalty": 0.0}, ValueError, "penalty must be positive"),
        ({"method": "sampled", "prior": "conv_filter"}, ValueError, 'prior="conv_filter" has no precisions'),
    ],
)
def test_what_cannot_be_is_refused_before_training(measurement, options, error, message):
    A, y = measurement
    with pytest.raises(error, match=message):
        reconstruct(A, y, network(), steps=FOREVER, **options)


def test_predcp_is_for_images_of_one_channel(float64):
    with pytest.raises(ValueError, match=r"images of shape \(1, H, W\), but they have \(9,\)"):
        reconstruct(torch.randn(4, 9), torch.randn(1, 4), nn.Conv1d(1, 1, 3), tune="predcp", method="exact")


def test_a_function_that_returns_no_filters_has_no_predcp(measurement):
    A, y = measurement
    with pytest.raises(ValueError, match="prior returned a Isotropic"):
        reconstruct(A, y, network(), steps=2, prior=Isotropic, tune="predcp")


def test_the_rate_of_predcp_matches_the_penalty_and_the_noise(measurement):
    A, y = measurement
    options = {"steps": 300, "rate": 1e-2, "tune": "predcp", "tuning_steps": 1, "penalty": 3e-4}
    given = reconstruct(A, y, network(), noise=0.5, **options)
    assert given.posterior.prior.predcp.rate == pytest.approx(3e-4 * y.numel() / (2 * 0.5))
    learnt = reconstruct(A, y, network(), **options)
    residual = (A(learnt.dip.image) - y).square().mean().item()
    assert learnt.posterior.prior.predcp.rate == pytest.approx(3e-4 * y.numel() / (2 * residual))


def test_training_may_stop_early(measurement):
    A, y = measurement
    rec = reconstruct(A, y, network(), steps=400, rate=3e-2, patience=5, tune=None)
    assert len(rec.dip.losses) - 1 == rec.dip.step + 5 < 399


def test_the_seed_reaches_samples(measurement):
    A, y = measurement
    options = {"steps": 2, "method": "sampled", "tune": None, "noise": 0.1, "num_samples": 4}
    one, same, other = (reconstruct(A, y, network(), seed=seed, **options).std for seed in (0, 0, 7))
    assert torch.equal(one, same)
    assert (one - other).abs().max() > 1e-3 * one.max()


# Networks of all kinds


class Dense(nn.Module):
    """A network without convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(SIZE * SIZE, 6), nn.Tanh(), nn.Linear(6, SIZE * SIZE))

    def forward(self, z):
        return self.layers(z.flatten(1)).view(-1, 1, SIZE, SIZE)


NETWORKS = {
    "without convolutions": (Dense, 4),
    "transposed": (lambda: nn.Sequential(nn.Conv2d(1, 3, 4, 2, 1), nn.Tanh(), nn.ConvTranspose2d(3, 1, 4, 2, 1)), 2),
    "one by one": (lambda: nn.Sequential(nn.Conv2d(1, 3, 1), nn.Tanh(), nn.Conv2d(3, 1, 1)), 2),
    "with norms": (lambda: network(groups=2), 7),
}


@pytest.mark.parametrize("method", ["exact", "sampled"])
@pytest.mark.parametrize("name", NETWORKS)
def test_any_network_becomes_the_gaussian_model_that_its_jacobian_says(measurement, name, method):
    A, y = measurement
    torch.manual_seed(0)
    make, parameters = NETWORKS[name]
    options = {"num_samples": 3000, "tolerance": 1e-8, "sketch": 0} if method == "sampled" else {}
    rec = reconstruct(A, y, make(), steps=20, rate=1e-2, tune=None, noise=0.01, method=method, prior="iid", **options)
    assert len(rec.pixels.layout.names) == parameters
    J = rec.pixels.jacobian(rec._z)[0]
    M = A(torch.eye(SIZE * SIZE).view(-1, 1, SIZE, SIZE)).flatten(1).mT
    K = J @ J.mT
    truth = K - K @ M.mT @ torch.linalg.solve(M @ K @ M.mT + 0.01 * torch.eye(len(M)), M @ K)
    if method == "exact":
        assert_close(rec.covariance(), truth, rtol=1e-7, atol=1e-10)
    else:
        variance = truth.diagonal()
        error = ((variance[:, None] * variance + truth**2) / 3000).sqrt()
        assert ((rec.covariance() - truth).abs() <= 5.5 * error + 1e-12).all()


def test_the_default_prior_is_one_that_the_network_can_have(measurement):
    A, _ = measurement
    assert settled(A, Dense(), None, "evidence", "exact", None, 0.0, {}).prior == "layerwise"
    assert settled(A, network(), None, "evidence", "exact", None, 0.0, {}).prior == "conv_filter"
    assert settled(A, network(), None, "evidence", "sampled", None, 0.0, {}).prior == "layerwise"
    assert set(PRIORS) == {"conv_filter", "iid", "layerwise", "g_prior"}
