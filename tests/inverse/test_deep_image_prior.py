"""The U-Net, and how it is trained on one measurement."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import ntkgp
from ntkgp.inverse import RayTransform, UNet, total_variation, train


def test_the_usual_network_has_the_usual_size():
    net = UNet()
    weights = sum(p.numel() for name, p in net.named_parameters() if name.endswith("weight"))
    assert weights == 76_608


@pytest.mark.parametrize("size", [16, 21])
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"skip": 0}, {"scales": 1}, {"positive": False}])
def test_sizes_and_norms(size, options):
    net = UNet(channels=4, **options)
    x = net(torch.randn(2, 1, size, size))
    assert x.shape == (2, 1, size, size)
    assert bool(((x > 0) & (x < 1)).all()) == options.get("positive", True)
    assert any(isinstance(m, nn.GroupNorm) for m in net.modules()) == ("groups" in options)


def test_it_is_linearised_without_a_fallback(float64):
    net, z = UNet(channels=4, groups=2), torch.randn(1, 1, 8, 8)
    lin = ntkgp.Linearization(net, example=z)
    v, J = torch.randn(lin.num_params), lin.jacobian(z)
    assert_close(lin.jvp(z, v), J @ v, rtol=1e-9, atol=1e-12)
    assert lin.features(z).num_outputs == 64


def problem():
    torch.manual_seed(0)
    A = RayTransform.parallel(16, 6)
    x = torch.zeros(1, 1, 16, 16)
    x[..., 4:10, 5:12] = 0.8
    return A, x, A(x), UNet(channels=8, scales=2)


def test_training_fits_the_measurement_and_leaves_the_network_alone():
    A, x, y, net = problem()
    before = [p.clone() for p in net.parameters()]
    z = A.fbp(y)
    found = train(A, y, net, z, penalty=1e-5, steps=300, rate=3e-3)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    assert found.losses[found.step] == min(found.losses)
    assert found.losses[found.step] < 0.02 * found.losses[0]
    loss = (A(found.image) - y).square().mean() + 1e-5 * total_variation(found.image).sum()
    assert loss.item() == pytest.approx(min(found.losses), rel=1e-4)
    assert (found.image - x).square().mean() < (z - x).square().mean()
    again = train(A, y, net, z, penalty=1e-5, steps=300, rate=3e-3)
    assert again.losses == found.losses


def test_progress_is_shown_when_asked_for(capsys):
    A, _, y, net = problem()
    train(A, y, net, A.fbp(y), steps=3, progress=True)
    told = capsys.readouterr().err
    assert "deep image prior" in told
    assert "3/3" in told
    assert "loss" in told
    train(A, y, net, A.fbp(y), steps=3, progress=False)
    assert capsys.readouterr().err == ""


def test_patience_ends_a_run_that_no_longer_gains():
    A, _, y, net = problem()
    found = train(A, y, net, A.fbp(y), steps=500, rate=1.0, patience=5)
    assert len(found.losses) < 500
    assert found.step < len(found.losses) - 5


def test_bad_input_is_named():
    A, _, y, net = problem()
    z = A.fbp(y)
    with pytest.raises(
        ValueError, match=r"y must be one measurement of shape \(1, 1, 6, 23\), but has \(2, 1, 6, 23\)"
    ):
        train(A, torch.cat([y, y]), net, z)
    with pytest.raises(ValueError, match=r"net must return images of shape \(1, 16, 16\), but they have \(1, 8, 8\)"):
        train(A, y, net, z[..., ::2, ::2])
    with pytest.raises(ValueError, match="the loss is nan at step 0"):
        train(A, y * torch.nan, net, z)
    with pytest.raises(ValueError, match="penalty must not be negative"):
        train(A, y, net, z, penalty=-1.0)
    with pytest.raises(ValueError, match="groups must divide channels"):
        UNet(channels=4, groups=3)
    with pytest.raises(ValueError, match="scales must be at least 1, but is 0"):
        UNet(scales=0)
