"""Filtered back-projection."""

import math

import torch
from torch import Tensor

from ntkgp.inverse.geometry import Geometry, Parallel

__all__ = ["filtered_back_projection"]


def filtered_back_projection(y: Tensor, geometry: Geometry, size: int, pixel: float) -> Tensor:  # (..., A, D)
    r"""Return the image (..., size, size) that the ramp filter and a sum over angles make of a sinogram.

    .. math:: \hat x(p) = \sum_a w(p)\, (h * c\, \Delta_a\, y_a)(u_a(p)), \qquad
       h_0 = \tfrac{1}{4 s^2},\ h_n = \tfrac{-1}{\pi^2 n^2 s^2}\ (n \text{ odd}),\ 0\ (n \text{ even})

    with s the distance of rays at the centre, c their cosines and w = 1 for parallel beams (Kak & Slaney 1988, 3.3 and
    3.4.2), and Δ what a ray stands for, see :func:`ray_shares`.
    """
    s = geometry.virtual_spacing
    filtered = _ramp(y * (geometry.weights * ray_shares(geometry, size * pixel / 2)).to(y), s)
    axis = ((torch.arange(size, dtype=torch.float64) - (size - 1) / 2) * pixel).to(y)
    down, right = torch.meshgrid(axis, axis, indexing="ij")
    image = y.new_zeros(*y.shape[:-2], size, size)
    for a in range(len(geometry.angles)):
        u, w = geometry.seen(right, down, a)
        image += w * _interpolated(filtered[..., a, :], u / s + (geometry.detectors - 1) / 2)
    return image


def ray_shares(geometry: Geometry, radius: float) -> Tensor:  # (A, D) or (A, 1)
    """Return the angle that each ray stands for; the directions of all lines through a point have π together.

    Parallel beams see every line within half a turn, a fan every line twice within a whole one. A fan over less, but
    at least half a turn and the angle under which it sees a disc of ``radius``, sees some lines twice, which share
    (Parker 1982; the scan's own opening for the disc's). Where not every line is seen, streaks remain.
    """
    if isinstance(geometry, Parallel):
        return angular_shares(geometry.angles, math.pi).unsqueeze(1)
    shares = angular_shares(geometry.angles, 2 * math.pi).unsqueeze(1)
    span = shares.sum().item()
    if not math.pi + 2 * math.asin(radius / geometry.source_origin) <= span < 2 * math.pi * (1 - 1e-9):
        return shares * min(1.0, math.pi / span)
    Delta, beta = (span - math.pi) / 2, _from_the_start(geometry.angles, shares.squeeze(1)).unsqueeze(1)
    gamma = (geometry.coordinates / geometry.source_detector).atan().clamp(-0.999 * Delta, 0.999 * Delta)
    rising = (beta / (Delta + gamma)).clamp(max=2)
    falling = ((span - beta) / (Delta - gamma)).clamp(max=2)
    return shares * (torch.sin(math.pi / 4 * rising) * torch.sin(math.pi / 4 * falling)).square()


def angular_shares(angles: Tensor, period: float) -> Tensor:  # (A,)
    """Return what each angle stands for: half of the gaps to its neighbours.

    Angles lie on a circle. If one gap is far larger than all others, nothing was measured there, and the shares at its
    ends are as large as their other halves.
    """
    if len(angles) == 1:
        return torch.full((1,), math.pi, dtype=torch.float64)
    order, gaps = _around(angles, period)
    if _is_open(gaps):
        gaps = torch.cat([gaps[:-1], gaps[-2:-1]])
        before = torch.cat([gaps[:1], gaps[:-1]])
    else:
        before = gaps.roll(1)
    shares = torch.empty(len(angles), dtype=torch.float64)
    shares[order] = (before + gaps) / 2
    return shares


def _around(angles: Tensor, period: float) -> tuple[Tensor, Tensor]:  # (A,) twice
    """Return the order of angles on a circle, from the far end of the largest gap on, and the gap behind each."""
    turned = angles.double() % period
    order = turned.argsort()
    gaps = torch.cat([turned[order].diff(), turned[order[:1]] + period - turned[order[-1:]]])
    start = -1 - int(gaps.argmax())
    return order.roll(start), gaps.roll(start)


def _is_open(gaps: Tensor) -> bool:
    """Whether the last gap, the largest, is one in which nothing was measured."""
    return bool(gaps[-1] > 2 * gaps[:-1].max())


def _from_the_start(angles: Tensor, shares: Tensor) -> Tensor:  # (A,) twice -> (A,)
    """Return how far each angle of a fan is from where its scan began, half a share before the first."""
    order, _ = _around(angles, 2 * math.pi)
    found = torch.empty_like(shares)
    found[order] = shares[order].cumsum(0) - shares[order] / 2
    return found


def _ramp(y: Tensor, s: float) -> Tensor:  # (..., D)
    """Convolve with the band-limited ramp, whose samples in space have no offset at frequency zero."""
    D = y.shape[-1]
    n = torch.arange(-D + 1, D)
    h = torch.where(n % 2 == 1, -1 / (math.pi * n.double() * s) ** 2, 0.0)
    h[D - 1] = 1 / (4 * s**2)
    length = 3 * D
    spectrum = torch.fft.rfft(y, length) * torch.fft.rfft(h.to(y), length)
    return s * torch.fft.irfft(spectrum, length)[..., D - 1 : 2 * D - 1]


def _interpolated(y: Tensor, at: Tensor) -> Tensor:  # (..., D), (H, W) -> (..., H, W)
    """Return y between its samples, zero beyond them."""
    below = at.floor()
    share, D = at - below, y.shape[-1]
    total = y.new_zeros(*y.shape[:-1], *at.shape)
    for index, weight in ((below, 1 - share), (below + 1, share)):
        inside = (index >= 0) & (index < D)
        total = total + torch.where(inside, weight, 0) * y[..., index.clamp(0, D - 1).long()]
    return total
