"""Images that are known exactly, to try reconstructions on."""

import math

import torch
from torch import Tensor

__all__ = ["discs", "rectangles", "shepp_logan"]

# Shepp & Logan (1974) with the contrasts of Toft (1996): density, half axes, centre, turn in degrees
_ELLIPSES = (
    (1.0, 0.69, 0.92, 0.0, 0.0, 0),
    (-0.8, 0.6624, 0.874, 0.0, -0.0184, 0),
    (-0.2, 0.11, 0.31, 0.22, 0.0, -18),
    (-0.2, 0.16, 0.41, -0.22, 0.0, 18),
    (0.1, 0.21, 0.25, 0.0, 0.35, 0),
    (0.1, 0.046, 0.046, 0.0, 0.1, 0),
    (0.1, 0.046, 0.046, 0.0, -0.1, 0),
    (0.1, 0.046, 0.023, -0.08, -0.605, 0),
    (0.1, 0.023, 0.023, 0.0, -0.606, 0),
    (0.1, 0.023, 0.046, 0.06, -0.605, 0),
)
_FINER = 4  # points a side that a pixel's mean is taken over


def shepp_logan(size: int) -> Tensor:  # (1, size, size)
    """Return the head of ellipses, between 0 and 1."""
    x, y = _grid(size)
    image = torch.zeros_like(x)
    for density, a, b, x0, y0, degrees in _ELLIPSES:
        u, v = _turned(x - x0, y + y0, math.radians(-degrees))
        image += density * ((u / a) ** 2 + (v / b) ** 2 <= 1)
    return _pixels(image.clamp(min=0))


def rectangles(size: int, angle: float, count: int = 5, seed: int = 0) -> Tensor:  # (1, size, size)
    """Return bright rectangles that are all turned by the same angle: most of their edges run in two directions.

    Args:
        size: pixels a side.
        angle: in radians, of their sides.
        count: how many; where they overlap, densities do not add.
        seed: of their places, sides and densities.
    """
    generator = torch.Generator().manual_seed(seed)
    x, y = _grid(size)
    image = torch.zeros_like(x)
    for _ in range(count):
        r, phi, long, thick, density = torch.rand(5, generator=generator).tolist()
        r, phi = 0.5 * math.sqrt(r), 2 * math.pi * phi
        u, v = _turned(x - r * math.cos(phi), y - r * math.sin(phi), angle)
        inside = (u.abs() <= 0.2 + 0.2 * long) & (v.abs() <= 0.05 + 0.07 * thick)
        image = torch.where(inside, torch.maximum(image, torch.tensor(0.4 + 0.6 * density)), image)
    return _pixels(image)


def discs(size: int, count: int = 5, seed: int = 0) -> Tensor:  # (1, size, size)
    """Return bright discs: edges run in all directions alike.

    Args:
        size: pixels a side.
        count: how many; where they overlap, densities do not add.
        seed: of their places, radii and densities.
    """
    generator = torch.Generator().manual_seed(seed)
    x, y = _grid(size)
    image = torch.zeros_like(x)
    for _ in range(count):
        r, phi, wide, density = torch.rand(4, generator=generator).tolist()
        r, phi = 0.55 * math.sqrt(r), 2 * math.pi * phi
        inside = (x - r * math.cos(phi)) ** 2 + (y - r * math.sin(phi)) ** 2 <= (0.08 + 0.17 * wide) ** 2
        image = torch.where(inside, torch.maximum(image, torch.tensor(0.4 + 0.6 * density)), image)
    return _pixels(image)


def _grid(size: int) -> tuple[Tensor, Tensor]:  # (n, n) twice
    """Return x to the right and y down on [−1, 1]², with several points for a pixel."""
    if size < 1:
        raise ValueError(f"size must be at least 1, but is {size}")
    n = size * _FINER
    at = (torch.arange(n) + 0.5) * (2 / n) - 1
    y, x = torch.meshgrid(at, at, indexing="ij")
    return x, y


def _turned(x: Tensor, y: Tensor, angle: float) -> tuple[Tensor, Tensor]:
    cos, sin = math.cos(angle), math.sin(angle)
    return x * cos + y * sin, y * cos - x * sin


def _pixels(image: Tensor) -> Tensor:  # (n, n) -> (1, size, size)
    return torch.nn.functional.avg_pool2d(image[None], _FINER)
