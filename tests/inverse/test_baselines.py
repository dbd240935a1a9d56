"""Other methods' error bars, through the same interface."""

import pytest
import torch
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

from ntkgp.inverse import Draws, RayTransform, UNet, UnitNoise, ensemble, mc_dropout, train

OPTIONS = {"steps": 5, "rate": 1e-2, "penalty": 1e-3}


@pytest.fixture
def measurement(float64):
    A = RayTransform.parallel(8, 4)
    y = A(torch.rand(1, 1, 8, 8))
    return A, y, A.fbp(y)


def small(**options):
    return UNet(channels=4, scales=2, skip=2, **options)


def test_draws_have_their_own_mean_and_covariance(float64):
    images = torch.randn(50, 1, 4, 4)
    draws = Draws(images)
    flat = images.flatten(1)
    assert_close(draws.mean, images.mean(0))
    assert_close(draws.covariance(), flat.T.cov(correction=0))
    assert_close(draws.std.flatten() ** 2, flat.var(0, correction=0))
    which = torch.tensor([1, 7, 3])
    assert_close(draws.covariance(which), flat[:, which].T.cov(correction=0))
    x = torch.randn(1, 4, 4)
    expected = MultivariateNormal(draws.mean.flatten(), flat.T.cov(correction=0) + 0.1 * torch.eye(16))
    assert draws.log_likelihood(x, 4, 0.1) == pytest.approx(expected.log_prob(x.flatten()).item() / 16, rel=1e-9)


def test_unit_noise_is_a_squared_error(measurement):
    A, y, z = measurement
    dip = train(A, y, small(), z, **OPTIONS)
    x = torch.rand(1, 8, 8)
    expected = -(x - dip.image[0]).square().mean() / 2 - torch.log(torch.tensor(2 * torch.pi)) / 2
    for patch in (1, 3):
        assert UnitNoise(dip).log_likelihood(x, patch) == pytest.approx(expected.item(), rel=1e-9)
    assert_close(UnitNoise(dip).std, torch.ones(1, 8, 8))


def test_dropout_draws_differ_and_repeat(measurement):
    A, y, z = measurement
    net = small(dropout=0.3)
    before = [p.clone() for p in net.parameters()]
    state = torch.get_rng_state()
    draws = mc_dropout(A, y, net, z, num_samples=6, **OPTIONS)
    assert torch.equal(torch.get_rng_state(), state)
    assert draws.samples.shape == (6, 1, 8, 8)
    assert len({image.sum().item() for image in draws.samples}) == 6
    assert_close(mc_dropout(A, y, net, z, num_samples=6, **OPTIONS).samples, draws.samples)
    assert all(map(torch.equal, before, net.parameters()))
    with pytest.raises(ValueError, match="net must have dropout with a positive probability"):
        mc_dropout(A, y, small(), z, **OPTIONS)
    with pytest.raises(ValueError, match="num_samples must be at least 2, but is 1"):
        mc_dropout(A, y, net, z, num_samples=1, **OPTIONS)


def test_members_are_trained_from_their_own_weights(measurement):
    A, y, z = measurement
    draws = ensemble(A, y, small, z, members=3, seed=5, **OPTIONS)
    for i in range(3):
        torch.manual_seed(5 + i)
        assert_close(draws.samples[i], train(A, y, small(), z, **OPTIONS).image[0])
    with pytest.raises(ValueError, match="members must be at least 2, but are 1"):
        ensemble(A, y, small, z, members=1, **OPTIONS)
