"""Phantoms are what they are said to be."""

import math

import pytest
import torch

from ntkgp.inverse import RayTransform, phantoms


def test_the_head_has_its_densities(float64):
    x = phantoms.shepp_logan(128)
    assert x.shape == (1, 128, 128)
    assert x.min() == 0
    assert x.max() == pytest.approx(1.0)
    area = 4 / 128**2  # of a pixel, on [−1, 1]²
    ellipses = sum(d * math.pi * a * b for d, a, b, *_ in phantoms._ELLIPSES)
    assert x.sum().item() * area == pytest.approx(ellipses, rel=3e-3)
    assert x[0, 64, 64].item() == pytest.approx(0.2)  # brain
    assert x[0, 60, 45] == 0  # the larger, left ventricle
    assert x[0, 64 - 22, 64].item() == pytest.approx(0.3)  # above the centre


def test_rectangles_have_edges_in_two_directions_and_discs_in_all(float64):
    def roughness(x: torch.Tensor, angle: float) -> float:
        """Square differences of the projection at an angle: large where edges run along the rays."""
        return RayTransform.parallel(64, [angle], 91)(x[None]).diff(dim=-1).square().sum().item()

    turn = math.radians(30)
    for seed in range(3):
        x = phantoms.rectangles(64, turn, seed=seed)
        assert 0 <= x.min() < x.max() <= 1
        along = max(roughness(x, -turn), roughness(x, math.pi / 2 - turn))
        between = max(roughness(x, math.pi / 4 - turn), roughness(x, 3 * math.pi / 4 - turn))
        assert along > 2 * between
        assert not torch.equal(x, phantoms.rectangles(64, turn, seed=seed + 10))
    disc = phantoms.discs(64, count=1, seed=1)
    values = [roughness(disc, a * math.pi / 8) for a in range(8)]
    assert max(values) < 1.2 * min(values)


def test_a_size_that_cannot_be_is_named():
    with pytest.raises(ValueError, match="size must be at least 1, but is 0"):
        phantoms.shepp_logan(0)
