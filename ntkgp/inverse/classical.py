"""Reconstructions without a network: Tikhonov's, and by total variation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ntkgp.inverse.operators import Measurement
from ntkgp.inverse.ray_transform import RayTransform
from ntkgp.inverse.total_variation import differences, differences_adjoint, total_variation
from ntkgp.solvers import conjugate_gradients

__all__ = ["CLASSICAL", "Classical", "classical", "tikhonov", "total_variation_reconstruction"]

CLASSICAL = ("fbp", "tikhonov", "tv")

_POWER_ITERATIONS = 30
_CHECK = 25  # iterations between looks at the objective
_DIFFERENCES_NORM = 8.0  # ‖D‖² in two dimensions, at most


@dataclass(frozen=True)
class Classical:
    """An image, and how well it solves its problem."""

    image: Tensor  # (B, *image_shape)
    iterations: int
    residual: float  # relative: of the linear system, or what the objective changed at last

    @property
    def mean(self) -> Tensor:  # (*image_shape)
        """The first image, as other reconstructions have it."""
        return self.image[0]


def classical(A: Measurement, y: Tensor, method: str, penalty: float) -> Classical:
    r"""Return argmin ‖A x − y‖² / d_y + ``penalty`` R(x), the objective of a deep image prior without its network.

    Args:
        A: the operator.
        y: measurements, (B, *measured_shape).
        method: "tv" for total variation R and x ≥ 0, "tikhonov" for R = ‖x‖², "fbp" for filtered back-projection.
        penalty: of R; a filtered back-projection has none.
    """
    if method == "fbp":
        if not isinstance(A, RayTransform):
            raise ValueError(f'method="fbp" is for a RayTransform, but A is a {type(A).__name__}')
        return Classical(A.fbp(y), 0, 0.0)
    d_y = A.measured_shape.numel()
    return (
        tikhonov(A, y, penalty * d_y)
        if method == "tikhonov"
        else total_variation_reconstruction(A, y, penalty * d_y / 2)
    )


def tikhonov(A: Measurement, y: Tensor, penalty: float, tolerance: float = 1e-6, steps: int = 500) -> Classical:
    """Return argmin ½ ‖A x − y‖² + ½ ``penalty`` ‖x‖², by conjugate gradients on (AᵀA + penalty I) x = Aᵀ y."""
    _check(A, y, penalty)
    shape = A.image_shape

    def normal(v: Tensor) -> Tensor:  # (B, n)
        return A.A_adjoint(A(v.unflatten(1, shape))).flatten(1) + penalty * v

    with torch.no_grad():
        found = conjugate_gradients(normal, A.A_adjoint(y).flatten(1), lambda v: v, tolerance, steps)
    return Classical(found.x.unflatten(1, shape), found.iterations, found.residual)


def total_variation_reconstruction(
    A: Measurement, y: Tensor, penalty: float, positive: bool = True, tolerance: float = 1e-5, steps: int = 3000
) -> Classical:
    r"""Return argmin ½ ‖A x − y‖² + ``penalty`` TV(x), over x ≥ 0 if ``positive``.

    By the primal-dual iteration of Chambolle & Pock (2011, algorithm 1), with u and w dual to A x and D x:

    .. math:: u \leftarrow (u + \sigma (A \bar x - y)) / (1 + \sigma), \quad
       w \leftarrow \Pi_{|\cdot| \le \lambda}(w + \sigma D \bar x), \quad
       x' = \Pi_{\ge 0}(x - \tau (A^\top u + D^\top w)), \quad \bar x = 2 x' - x

    and σ = τ = 1 / √(‖A‖² + ‖D‖²), the first by power iteration.

    Args:
        A: the operator.
        y: measurements, (B, *measured_shape).
        penalty: λ.
        positive: whether images are nonnegative.
        tolerance: stop when the objective changes by less, relatively, in 25 iterations.
        steps: when to give up.
    """
    _check(A, y, penalty)
    if len(A.image_shape) < 2:
        raise ValueError(f"total variation is for images (..., H, W), but A's have shape {tuple(A.image_shape)}")
    H, W = A.image_shape[-2:]

    def objective(x: Tensor) -> float:
        return ((A(x) - y).square().sum() / 2 + penalty * total_variation(x).sum()).item()

    with torch.no_grad():
        step = (_largest(A, y) + _DIFFERENCES_NORM) ** -0.5
        x = torch.zeros(len(y), *A.image_shape).to(y)
        bar, u, w = x, torch.zeros_like(y), torch.zeros_like(differences(x))
        value, change, k = objective(x), float("inf"), 0
        while k < steps and change > tolerance:
            for _ in range(_CHECK):
                u = (u + step * (A(bar) - y)) / (1 + step)
                w = (w + step * differences(bar)).clamp(-penalty, penalty)
                new = x - step * (A.A_adjoint(u) + differences_adjoint(w, H, W))
                new = new.clamp(min=0) if positive else new
                x, bar = new, 2 * new - x
            k, before, value = k + _CHECK, value, objective(x)
            change = abs(before - value) / max(abs(value), torch.finfo(y.dtype).tiny)
    return Classical(x, k, change)


def _largest(A: Measurement, like: Tensor) -> float:
    """Return ‖A‖², a little above what power iteration finds from below."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(1, *A.image_shape, generator=generator, dtype=torch.float64).to(like)
    size = 0.0
    for _ in range(_POWER_ITERATIONS):
        v = A.A_adjoint(A(v / v.norm()))
        size = v.norm().item()
    return 1.02 * size


def _check(A: Measurement, y: Tensor, penalty: float) -> None:
    if not penalty > 0:
        raise ValueError(f"penalty must be positive, but is {penalty}")
    if y.shape[1:] != A.measured_shape:
        raise ValueError(
            f"y must have the shape (B, {', '.join(map(str, A.measured_shape))}), but has {tuple(y.shape)}"
        )
    if not y.isfinite().all():
        raise ValueError("y must be finite, but some measurements are not")
