r"""The mode of the linear model, θ_⋆, by Newton's method: in function space and in weight space.

Both maximise :math:`\psi(\theta) = \log p(y \mid f_{lin}(\theta)) - \tfrac12 \|\theta - m_0\|^2_{S_0^{-1}}`, which is
concave for log-concave likelihoods; one step is exact for Gaussian ones. Along a step f moves on a line, so a line
search costs no pass over the network.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from ntkgp.likelihoods import Expansion
from ntkgp.posteriors.capacitance import capacitance

__all__ = ["Certificate", "Mode", "function_space_mode", "weight_space_mode"]

_MAX_STEPS = 300
_SHORTEST = 1e-6


@dataclass(frozen=True)
class Certificate:
    """How well a mode satisfies its equation."""

    converged: bool
    steps: int
    gradient_norm: float  # ‖S₀^½ ∇ψ‖: how far, in prior standard deviations, the gradient could still move θ
    decrement: float  # ½ gᵀH⁻¹g before the last step: what ψ could still gain, to second order


@dataclass(frozen=True)
class Mode:
    """θ_⋆ − θ* and its certificate."""

    delta: Tensor  # (P,)
    certificate: Certificate


def function_space_mode(
    K: Tensor, f: Tensor, mu: Tensor, expand: Callable[[Tensor], Expansion]
) -> tuple[Tensor, Certificate]:  # (N C, N C), (N, C), (N, C) -> (N, C)
    r"""Return α with θ_⋆ − m₀ = S₀ Jᵀ α.

    With b = Λ(f − μ) + r a Newton step goes to α = b − R B⁻¹ Rᵀ K b (Rasmussen & Williams 2006, algorithm 3.1, for
    any root R of blocks that may be singular). The first step starts from any f, which need not be of the form
    μ + K α; it is taken if it is better than no data at all, α = 0.

    Args:
        K: the prior covariance of the training outputs.
        f: where to start: the network's outputs, or those of a mode nearby.
        mu: the prior mean of the outputs, f_lin(x; m₀).
        expand: the likelihood to second order at latent values (N, C).
    """

    def psi(alpha: Tensor, moved: Tensor) -> Tensor:  # K α
        return expand(mu + moved).log_prob - (alpha * moved).sum() / 2

    def newton(E: Expansion, distance: Tensor) -> Tensor:
        b = E.curvature.apply(distance) + E.r
        L = torch.linalg.cholesky(capacitance(K, E.R))
        u = E.R.mT @ times(K, b).reshape(-1, 1)
        u = solve_triangular(L.mT, solve_triangular(L, u, upper=False), upper=True)
        return b - (E.R @ u).view_as(b)

    alpha = newton(expand(f), f - mu)
    moved = times(K, alpha)
    if not psi(alpha, moved) >= psi(0 * alpha, 0 * moved):
        alpha, moved = 0 * alpha, 0 * moved
    value, decrement, steps, converged = psi(alpha, moved), float("inf"), 1, False
    while steps < _MAX_STEPS and not converged:
        E = expand(mu + moved)
        step = newton(E, moved) - alpha
        along = times(K, step)
        before, decrement = decrement, (step * times(K, E.r - alpha)).sum().item() / 2
        size = _line_search(lambda s: psi(alpha + s * step, moved + s * along), value)  # noqa: B023
        alpha, moved = alpha + size * step, moved + size * along
        value, steps = psi(alpha, moved), steps + 1
        converged = _finished(decrement, before, value) or size == 0
    gradient = expand(mu + moved).r - alpha
    norm = (gradient * times(K, gradient)).sum().clamp(min=0).sqrt().item()
    return alpha, Certificate(converged, steps, norm, decrement)


def weight_space_mode(
    log_joint: Callable[[Tensor], Tensor],
    gradient: Callable[[Tensor], Tensor],
    newton: Callable[[Tensor, Tensor], Tensor],
    whiten: Callable[[Tensor], Tensor],
    start: Tensor,
) -> Mode:
    r"""Return δ = θ_⋆ − θ*.

    Args:
        log_joint: ψ(θ* + δ).
        gradient: ∇ψ.
        newton: (δ, g) -> H(δ)⁻¹ g, at least approximately.
        whiten: g -> S₀^½ᵀ g, for the certificate.
        start: δ to start from, (P,).
    """
    delta, value = start, log_joint(start)
    decrement, steps, converged = float("inf"), 0, False
    while steps < _MAX_STEPS and not converged:
        g = gradient(delta)
        step = newton(delta, g)
        before, decrement = decrement, (g @ step).item() / 2
        size = _line_search(lambda s: log_joint(delta + s * step), value)  # noqa: B023
        delta, steps = delta + size * step, steps + 1
        value = log_joint(delta)
        converged = _finished(decrement, before, value) or size == 0
    norm = whiten(gradient(delta)).norm().item()
    return Mode(delta, Certificate(converged, steps, norm, decrement))


def _finished(decrement: float, before: float, value: Tensor) -> bool:
    """Tell whether only rounding is left: ψ has nothing to gain, and steps no longer shrink, or are far too small.

    Where Λ is not the Hessian itself convergence is linear, so a ψ without gains is not enough.
    """
    tiny = torch.finfo(value.dtype).eps
    gained = 10 * tiny * (1 + abs(value.item()))
    return decrement <= gained and (decrement > before / 2 or decrement <= tiny * gained)


def _line_search(value_at: Callable[[float], Tensor], value: Tensor) -> float:
    """Halve a step until it does not lose, or double it while it gains, as where Λ overstates the curvature."""
    slack = 100 * torch.finfo(value.dtype).eps * (1 + abs(value.item()))
    size, reached = 1.0, value_at(1.0)
    while not reached >= value - slack:
        size /= 2
        if size < _SHORTEST:
            return 0.0
        reached = value_at(size)
    while size >= 1 and (further := value_at(2 * size)) > reached + slack:
        size, reached = 2 * size, further
    return size


def times(K: Tensor, u: Tensor) -> Tensor:  # (N C, N C), (N, C) -> (N, C)
    """Multiply values at points by a Gram matrix."""
    return (K @ u.reshape(-1)).view_as(u)
