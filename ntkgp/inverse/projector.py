"""Line integrals of an image as a sparse matrix."""

import torch
from torch import Tensor

from ntkgp.inverse.geometry import Rays
from ntkgp.inverse.sparse import Sparse

__all__ = ["joseph"]


def joseph(rays: Rays, size: int, pixel: float, dtype: torch.dtype) -> Sparse:  # (angles detectors, size²)
    """Return the matrix of Joseph's method (1982): integrals along rays over the image interpolated between pixels.

    A ray crosses the lines of pixel centres that run most nearly across it; at each crossing the two nearest pixels
    share the ray's length between two lines, in proportion to their nearness.

    Args:
        rays: A x D of them.
        size: pixels in a row and in a column.
        pixel: the length of their sides.
        dtype: of the entries, which are computed in double precision.
    """
    D = rays.points.shape[1]
    parts = [_entries(p, d, size, pixel) for p, d in zip(rays.points, rays.directions, strict=True)]
    i = torch.cat([row + D * angle for angle, (row, _, _) in enumerate(parts)])
    j, values = (torch.cat(column) for column in list(zip(*parts, strict=True))[1:])
    return Sparse.from_entries(i, j, values.to(dtype), len(parts) * D, size * size)


def _entries(p: Tensor, d: Tensor, size: int, pixel: float) -> tuple[Tensor, Tensor, Tensor]:  # (D, 2) twice
    """Return the entries of one projection: which ray, which pixel, what length."""
    steep = d[:, 1].abs() >= d[:, 0].abs()  # such rays cross rows, the others columns
    main, other = steep.long(), 1 - steep.long()
    take = lambda v, axis: v.gather(1, axis.unsqueeze(1))  # noqa: E731
    p_main, p_other, d_main, d_other = take(p, main), take(p, other), take(d, main), take(d, other)
    lines = torch.arange(size, dtype=p.dtype).expand(len(p), size)  # (D, size)
    middle = (size - 1) / 2
    crossing = p_other + ((lines - middle) * pixel - p_main) / d_main * d_other  # where each line is crossed
    place = crossing / pixel + middle
    below = place.floor()
    share, length = place - below, (pixel / d_main.abs()).expand_as(place)
    found = []
    for offset, weight in ((0, 1 - share), (1, share)):
        across = below + offset
        inside = (across >= 0) & (across < size) & (weight > 0)
        row, column = torch.where(steep.unsqueeze(1), lines, across), torch.where(steep.unsqueeze(1), across, lines)
        which = torch.arange(len(p)).unsqueeze(1).expand_as(place)
        found.append((which[inside], (row * size + column).long()[inside], (length * weight)[inside]))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))  # type: ignore[return-value]
