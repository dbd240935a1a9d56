"""Reconstructions without a network, against dense algebra and closed forms."""

import pytest
import torch
from torch.testing import assert_close

import ntkgp
from ntkgp.inverse import Mask, Matrix, RayTransform, tikhonov, total_variation, total_variation_reconstruction
from ntkgp.inverse.total_variation import differences, differences_adjoint


def test_tikhonov_solves_its_normal_equations(float64):
    M, y = torch.randn(7, 12), torch.randn(2, 7)
    A = Matrix(M, (1, 3, 4))
    found = tikhonov(A, y, 0.3, tolerance=1e-12)
    expected = torch.linalg.solve(M.mT @ M + 0.3 * torch.eye(12), (y @ M).mT).mT
    assert_close(found.image.flatten(1), expected, rtol=1e-9, atol=1e-10)
    assert found.residual <= 1e-12
    assert found.iterations > 0


def test_total_variation_adds_up_absolute_differences(float64):
    x = torch.tensor([[[0.0, 1.0, 3.0], [5.0, 1.0, 2.0]]])
    assert total_variation(x).tolist() == [(5 + 0 + 1) + (1 + 2 + 4 + 1)]
    x, d = torch.randn(2, 4, 5), torch.randn(2, 3 * 5 + 4 * 4)
    assert_close((differences(x) * d).sum(), (x * differences_adjoint(d, 4, 5)).sum())


def test_two_pixels_meet_halfway(float64):
    A = Mask(torch.ones(1, 2, dtype=torch.bool), (1, 1, 2))
    found = total_variation_reconstruction(A, torch.tensor([[[1.0, 4.0]]]), 0.5, tolerance=1e-12)
    assert_close(found.image.flatten(), torch.tensor([1.5, 3.5]), rtol=1e-5, atol=0)
    flat = total_variation_reconstruction(A, torch.tensor([[[1.0, 4.0]]]), 9.0, tolerance=1e-12)
    assert_close(flat.image.flatten(), torch.tensor([2.5, 2.5]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("positive", [True, False])
def test_no_image_nearby_has_a_smaller_objective(float64, positive):
    A = RayTransform.parallel(8, 5)
    y, penalty = A(torch.rand(1, 1, 8, 8)) + torch.randn(1, 1, 5, 12), 0.4
    objective = lambda x: (A(x) - y).square().sum() / 2 + penalty * total_variation(x).sum()  # noqa: E731
    x = total_variation_reconstruction(A, y, penalty, positive, tolerance=1e-13, steps=20000).image
    for size in (1e-3, 1e-2, 1e-1):
        for _ in range(50):
            near = x + size * torch.randn_like(x)
            assert objective(near.clamp(min=0) if positive else near) >= objective(x) - 1e-8
    assert positive == bool((x >= 0).all())


@pytest.mark.parametrize("method", [tikhonov, total_variation_reconstruction])
def test_bad_input_is_named(method):
    A = RayTransform.parallel(8, 5)
    with pytest.raises(ValueError, match="penalty must be positive, but is 0"):
        method(A, torch.zeros(1, 1, 5, 12), 0.0)
    with pytest.raises(ValueError, match=r"y must have the shape \(B, 1, 5, 12\), but has \(1, 5, 12\)"):
        method(A, torch.zeros(1, 5, 12), 1.0)
    with pytest.raises(ValueError, match="y must be finite"):
        method(A, torch.full((1, 1, 5, 12), torch.nan), 1.0)


def test_the_same_call_reconstructs_without_a_network(float64):
    A = RayTransform.parallel(8, 6)
    x = torch.rand(1, 1, 8, 8)
    y, penalty = A(x), 1e-2
    d_y = y.numel()
    assert_close(ntkgp.reconstruct(A, y, method="fbp").mean, A.fbp(y)[0])

    def objective(image, R):
        return ((A(image) - y).square().sum() / d_y + penalty * R(image)).item()

    for method, R in (("tikhonov", lambda v: v.square().sum()), ("tv", lambda v: total_variation(v).sum())):
        found = ntkgp.reconstruct(A, y, method=method, penalty=penalty).image
        for _ in range(10):  # no point nearby is better
            other = (found + 1e-2 * torch.randn_like(found)).clamp(min=0 if method == "tv" else -9)
            assert objective(found, R) <= objective(other, R)
        for factor in (0.98, 1.02):
            assert objective(found, R) <= objective(found * factor, R)
    with pytest.raises(ValueError, match='method="fbp" is for a RayTransform, but A is a Matrix'):
        ntkgp.reconstruct(torch.randn(5, 9), torch.randn(1, 5), method="fbp")
    with pytest.raises(ValueError, match="method must be one of auto, exact, sampled, fbp, tikhonov, tv, but is 'art'"):
        ntkgp.reconstruct(A, y, method="art")
