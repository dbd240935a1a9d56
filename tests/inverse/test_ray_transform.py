"""Projections against closed forms, and back."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ntkgp.inverse import RayTransform
from ntkgp.inverse.fbp import angular_shares

CENTRE = (-0.21, 0.13)  # right of and below the middle, in units of the image's width


def grid(size: int, finer: int = 1) -> tuple[Tensor, Tensor]:
    axis = (torch.arange(size * finer) - (size * finer - 1) / 2) / (size * finer)
    down, right = torch.meshgrid(axis, axis, indexing="ij")
    return right, down


def disc(size: int, radius: float) -> Tensor:  # (1, 1, size, size)
    right, down = grid(size, 8)
    inside = ((right - CENTRE[0]) ** 2 + (down - CENTRE[1]) ** 2 <= radius**2).to(right)
    return torch.nn.functional.avg_pool2d(inside[None, None], 8)


def blob(size: int, width: float) -> Tensor:
    right, down = grid(size)
    return (-((right - CENTRE[0]) ** 2 + (down - CENTRE[1]) ** 2) / (2 * width**2)).exp()[None, None]


def transform(kind: str, size: int) -> RayTransform:
    """Return a transform of an image of width one."""
    if kind == "parallel":
        return RayTransform.parallel(size, 20, pixel_size=1 / size)
    angles = torch.arange(30) * (2 * math.pi / 30)
    return RayTransform.fan(size, angles, 2.0, 3.0, 2 * size, 2.4 / (2 * size), 1 / size)


def distances(A: RayTransform) -> Tensor:  # (A, D)
    """Return how far each ray passes from the centre of disc and blob, from where source and detector stand."""
    g, (x, y) = A.geometry, CENTRE
    cos, sin = g.angles.cos()[:, None], g.angles.sin()[:, None]
    u = (torch.arange(g.detectors) - (g.detectors - 1) / 2)[None] * g.spacing
    if not hasattr(g, "source_origin"):
        return (x * cos - y * sin - u).abs()
    source = g.source_origin * sin, g.source_origin * cos  # right, down
    behind = g.source_detector - g.source_origin
    pixel = u * cos - behind * sin, -u * sin - behind * cos
    along = pixel[0] - source[0], pixel[1] - source[1]
    cross = along[0] * (y - source[1]) - along[1] * (x - source[0])
    return cross.abs() / (along[0] ** 2 + along[1] ** 2).sqrt()


def relative(found: Tensor, true: Tensor) -> float:
    return ((found - true).norm() / true.norm()).item()


@pytest.mark.parametrize("kind", ["parallel", "fan"])
def test_a_disc_casts_its_chords(kind, float64):
    radius, errors = 0.2, []
    for size in (32, 64, 128):
        A = transform(kind, size)
        chords = 2 * (radius**2 - distances(A) ** 2).clamp(min=0).sqrt()
        errors.append(relative(A(disc(size, radius))[0, 0], chords))
    # A disc's edge is resolved to a pixel: the squared error of chords falls with the pixel, up to its logarithm.
    assert errors[0] < 0.05
    assert errors[1] < 0.75 * errors[0]
    assert errors[2] < 0.75 * errors[1]


@pytest.mark.parametrize("kind", ["parallel", "fan"])
def test_a_smooth_blob_is_integrated_to_second_order(kind, float64):
    width, errors = 0.06, []
    for size in (32, 64, 128):
        A = transform(kind, size)
        integrals = math.sqrt(2 * math.pi) * width * (-(distances(A) ** 2) / (2 * width**2)).exp()
        errors.append(relative(A(blob(size, width))[0, 0], integrals))
    assert errors[0] < 0.05
    assert errors[1] == pytest.approx(errors[0] / 4, rel=0.2)
    assert errors[2] == pytest.approx(errors[1] / 4, rel=0.2)


def test_a_ray_along_a_row_adds_up_the_row(float64):
    A = RayTransform.parallel(5, [0.0, math.pi / 2], detectors=5)
    x = torch.randn(1, 1, 5, 5)
    assert_close(A(x)[0, 0, 0], x[0, 0].sum(0))  # x' = x: a detector for each column
    assert_close(A(x)[0, 0, 1], x[0, 0].sum(1).flip(0))  # x' = −y, and y points down


def test_the_source_of_a_fan_is_below_at_angle_zero_and_magnifies(float64):
    """As the Helsinki data are oriented: u = SD x' / (SO − y')."""
    A = RayTransform.fan(64, [0.0], 200.0, 300.0, 201, 1.0)
    x = torch.zeros(1, 1, 64, 64)
    x[0, 0, 50, 40] = 1.0  # 18.5 below the middle, 8.5 to the right
    profile = A(x)[0, 0, 0]
    centre = (profile * A.geometry.coordinates).sum() / profile.sum()
    assert centre.item() == pytest.approx(300 * 8.5 / (200 - 18.5), abs=0.1)


@pytest.mark.parametrize("kind", ["parallel", "fan"])
def test_filtered_back_projection_returns_the_image(kind, float64):
    size, width = 64, 0.06
    if kind == "parallel":
        A = RayTransform.parallel(size, 90, pixel_size=1 / size)
    else:
        A = RayTransform.fan(size, torch.arange(180) * (math.pi / 90), 2.0, 3.0, 192, 2.4 / 192, 1 / size)
    x = blob(size, width)
    assert relative(A.fbp(A(x)), x) < 0.03
    assert A.fbp(torch.stack([A(x), 2 * A(x)])).shape == (2, 1, 1, size, size)


@pytest.mark.parametrize("degrees", [215, 240, 300])
def test_a_fan_that_sees_some_lines_twice_shares_them(degrees, float64):
    size, width = 64, 0.06
    angles = 0.4 + torch.arange(degrees) * (math.pi / 180)
    A = RayTransform.fan(size, angles, 2.0, 3.0, 192, 2.4 / 192, 1 / size)
    x = blob(size, width)
    assert relative(A.fbp(A(x)), x) < 0.03
    order = torch.randperm(degrees)
    shuffled = RayTransform.fan(size, angles[order], 2.0, 3.0, 192, 2.4 / 192, 1 / size)
    assert_close(shuffled.fbp(shuffled(x)), A.fbp(A(x)), rtol=1e-9, atol=1e-11)


def test_a_number_of_angles_is_half_a_turn_of_beams_and_a_whole_one_of_fans(float64):
    size = 64
    A = RayTransform.fan(size, 120, 2.0, 3.0, 192, 2.4 / 192, 1 / size)
    x = blob(size, 0.06)
    assert_close(A.geometry.angles, torch.arange(120) * (math.pi / 60))
    assert relative(A.fbp(A(x)), x) < 0.03
    assert_close(RayTransform.parallel(size, 6).geometry.angles, torch.arange(6) * (math.pi / 6))


def test_uneven_angles_stand_for_what_they_see(float64):
    size, x = 64, blob(64, 0.06)
    even = torch.arange(60) * (math.pi / 60)
    A = RayTransform.parallel(size, torch.cat([even, even[:12] + math.pi / 120]), pixel_size=1 / size)
    assert relative(A.fbp(A(x)), x) < 0.03


def test_angles_stand_for_their_share_of_the_circle(float64):
    even = torch.arange(6) * (math.pi / 6)
    assert_close(angular_shares(even, math.pi), torch.full((6,), math.pi / 6))
    assert_close(angular_shares(even[[3, 0, 5, 1, 4, 2]], math.pi), torch.full((6,), math.pi / 6))
    assert_close(angular_shares(torch.arange(12) * (math.pi / 6), math.pi), torch.full((12,), math.pi / 12))
    assert_close(angular_shares(torch.arange(12) * (math.pi / 6), 2 * math.pi), torch.full((12,), math.pi / 6))
    assert_close(angular_shares(torch.tensor([0.0, 0.1, 0.4]), math.pi), torch.tensor([0.1, 0.2, 0.3]))
    assert_close(angular_shares(torch.tensor([0.4, 3.1, 3.2]), 2 * math.pi).sum(), torch.tensor(2 * math.pi))
    across = torch.tensor([3.0, 3.1, 0.1])  # the scan goes on through π
    assert_close(angular_shares(across, math.pi), angular_shares(torch.tensor([0.0, 0.1, 0.1 + math.pi - 3]), math.pi))
    assert_close(angular_shares(torch.tensor([0.3]), math.pi), torch.tensor([math.pi]))
