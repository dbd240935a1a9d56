r"""Where rays run: parallel beams, and fans onto a flat detector.

Coordinates are those of the image: x to the right, y down, from the centre. For a projection at angle θ the axes turn:
x' = x cos θ − y sin θ runs along the detector, y' = x sin θ + y cos θ towards the source.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Fan", "Geometry", "Parallel", "Rays"]


@dataclass(frozen=True)
class Rays:
    """Lines p + t d, one for every angle and detector, (angles, detectors, 2) each; d has length one."""

    points: Tensor
    directions: Tensor


@dataclass(frozen=True)
class Parallel:
    """Rays x' = u at detector coordinate u."""

    angles: Tensor  # radians, (A,)
    detectors: int
    spacing: float

    @property
    def coordinates(self) -> Tensor:  # (D,)
        """Where on the detector each ray ends."""
        return _centred(self.detectors, self.spacing)

    def rays(self) -> Rays:
        """Return all rays, angle by angle."""
        along, towards = _axes(self.angles)
        points = self.coordinates[None, :, None] * along[:, None]
        return Rays(points, towards[:, None].expand_as(points))

    def needed(self, radius: float) -> float:
        """Return the half width of a detector that sees a disc around the centre."""
        return radius

    # Filtered back-projection

    @property
    def weights(self) -> Tensor:  # (D,)
        """What projections are multiplied with before they are filtered."""
        return torch.ones_like(self.coordinates)

    @property
    def virtual_spacing(self) -> float:
        """The distance of rays at the centre of the image."""
        return self.spacing

    def seen(self, x: Tensor, y: Tensor, angle: int) -> tuple[Tensor, Tensor]:  # (H, W) twice -> (H, W) twice
        """Return where points are seen, as a coordinate at the centre of the image, and what they are weighed with."""
        u = x * self.angles[angle].cos() - y * self.angles[angle].sin()
        return u, torch.ones_like(u)


@dataclass(frozen=True)
class Fan:
    """Rays from a source at y' = +``source_origin``, which sees (x', y') at u = x' SD / (SO − y')."""

    angles: Tensor  # radians, (A,)
    detectors: int
    spacing: float
    source_origin: float
    source_detector: float

    @property
    def coordinates(self) -> Tensor:  # (D,)
        """Where on the detector each ray ends."""
        return _centred(self.detectors, self.spacing)

    def rays(self) -> Rays:
        """Return all rays, angle by angle."""
        along, towards = _axes(self.angles)
        points = (self._at_centre[None, :, None]) * along[:, None]
        directions = points - self.source_origin * towards[:, None]
        return Rays(points, directions / directions.norm(dim=-1, keepdim=True))

    @property
    def _at_centre(self) -> Tensor:  # (D,)
        return self.coordinates * (self.source_origin / self.source_detector)

    def needed(self, radius: float) -> float:
        """Return the half width of a detector that sees a disc around the centre."""
        return self.source_detector * math.tan(math.asin(radius / self.source_origin))

    @property
    def weights(self) -> Tensor:  # (D,)
        """Return the cosine of the angle between a ray and the central one."""
        return self.source_origin / (self.source_origin**2 + self._at_centre**2).sqrt()

    @property
    def virtual_spacing(self) -> float:
        """The distance of rays at the centre of the image."""
        return self.spacing * self.source_origin / self.source_detector

    def seen(self, x: Tensor, y: Tensor, angle: int) -> tuple[Tensor, Tensor]:  # (H, W) twice -> (H, W) twice
        """Return where points are seen, as a coordinate at the centre of the image, and what they are weighed with."""
        cos, sin = self.angles[angle].cos(), self.angles[angle].sin()
        magnified = self.source_origin / (self.source_origin - x * sin - y * cos)
        return (x * cos - y * sin) * magnified, magnified**2


Geometry = Parallel | Fan


def _centred(n: int, spacing: float) -> Tensor:  # (n,)
    return (torch.arange(n, dtype=torch.float64) - (n - 1) / 2) * spacing


def _axes(angles: Tensor) -> tuple[Tensor, Tensor]:  # (A, 2) twice
    """Return the directions in which x' and y' grow, in image coordinates."""
    cos, sin = angles.double().cos(), angles.double().sin()
    return torch.stack([cos, -sin], dim=1), torch.stack([sin, cos], dim=1)
