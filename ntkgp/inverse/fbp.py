"""Filtered back-projection."""

import math

import torch
from torch import Tensor

from ntkgp.inverse.geometry import Geometry

__all__ = ["filtered_back_projection"]


def filtered_back_projection(y: Tensor, geometry: Geometry, size: int, pixel: float) -> Tensor:  # (..., A, D)
    r"""Return the image (..., size, size) that the ramp filter and a sum over angles make of a sinogram.

    .. math:: \hat x(p) = \sum_a \Delta_a\, w(p)\, (h * c\, y_a)(u_a(p)), \qquad
       h_0 = \tfrac{1}{4 s^2},\ h_n = \tfrac{-1}{\pi^2 n^2 s^2}\ (n \text{ odd}),\ 0\ (n \text{ even})

    with s the distance of rays at the centre, c their cosines and w = 1 for parallel beams (Kak & Slaney 1988, 3.3 and
    3.4.2, which sum over [0, π) and [0, 2π)). Where angles see every line more than once the Δ sum to π all the same;
    where they do not see every line, streaks remain.
    """
    s = geometry.virtual_spacing
    filtered = _ramp(y * geometry.weights.to(y), s)
    axis = ((torch.arange(size, dtype=torch.float64) - (size - 1) / 2) * pixel).to(y)
    down, right = torch.meshgrid(axis, axis, indexing="ij")
    image = y.new_zeros(*y.shape[:-2], size, size)
    for a, share in enumerate(angular_shares(geometry.angles).tolist()):
        u, w = geometry.seen(right, down, a)
        image += share * w * _interpolated(filtered[..., a, :], u / s + (geometry.detectors - 1) / 2)
    return image


def angular_shares(angles: Tensor) -> Tensor:  # (A,)
    """Return what each angle stands for: half of the gaps to its neighbours, π in all at most."""
    if len(angles) == 1:
        return torch.full((1,), math.pi, dtype=torch.float64)
    order = angles.double().argsort()
    gaps = angles.double()[order].diff()
    shares = torch.empty(len(angles), dtype=torch.float64)
    shares[order] = (torch.cat([gaps[:1], gaps]) + torch.cat([gaps, gaps[-1:]])) / 2
    return shares * min(1.0, math.pi / shares.sum().item())


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
