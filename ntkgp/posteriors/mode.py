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

__all__ = ["Certificate", "Mode", "WeightSpaceProblem", "function_space_mode", "weight_space_mode"]

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


@dataclass(frozen=True)
class WeightSpaceProblem:
    """ψ and what a search in weight space needs of it; f are latent values at the training points, (N, C)."""

    log_prob: Callable[[Tensor], Tensor]  # f -> log p(y | f)
    quadratic: Callable[[Tensor], Tensor]  # δ -> ½ ‖θ* + δ − m₀‖²_{S₀⁻¹}
    gradient: Callable[[Tensor, Tensor], Tensor]  # (δ, f) -> ∇ψ
    newton: Callable[[Tensor, Tensor, Tensor], Tensor]  # (δ, f, g) -> H⁻¹ g, at least approximately
    push: Callable[[Tensor], Tensor]  # v -> J v
    whiten: Callable[[Tensor], Tensor]  # g -> S₀^½ᵀ g, for the certificate


def weight_space_mode(
    problem: WeightSpaceProblem,
    start: Tensor,
    f: Tensor,
    tolerance: float | None = None,
    first: Tensor | None = None,
    max_steps: int = _MAX_STEPS,
    visit: Callable[[Tensor], None] = lambda delta: None,
) -> Mode:
    r"""Return δ = θ_⋆ − θ*.

    The outputs f + J δ are carried along, so that a step costs one product for the gradient, those that ``newton``
    takes, and one to move f; the line search costs none.

    Args:
        problem: what to maximise.
        start: δ to start from, (P,).
        f: what the network returns at the training points.
        tolerance: stop when the error of θ in the norm of H is estimated to be so small beside ‖θ − m₀‖ in that of the
            prior; by default when only rounding is left.
        first: the direction of the first step, if it is known.
        max_steps: when to give up; the certificate says whether it converged.
        visit: called with δ after every step.
    """

    def psi(delta: Tensor, moved: Tensor) -> Tensor:
        return problem.log_prob(moved) - problem.quadratic(delta)

    delta, moved = start, f + problem.push(start) if start.any() else f
    value, decrement, steps, converged = psi(delta, moved), float("inf"), 0, False
    g = problem.gradient(delta, moved)
    while steps < max_steps and not converged:
        step = problem.newton(delta, moved, g) if first is None or steps > 0 else first
        along = problem.push(step)
        before, decrement = decrement, (g @ step).item() / 2
        size = _line_search(lambda s: psi(delta + s * step, moved + s * along), value)  # noqa: B023
        delta, moved, steps = delta + size * step, moved + size * along, steps + 1
        value, g = psi(delta, moved), problem.gradient(delta, moved)
        visit(delta)
        close = tolerance is not None and decrement <= tolerance**2 * problem.quadratic(delta).item()
        converged = close or size == 0 or _finished(decrement, before, value)
    return Mode(delta, Certificate(converged, steps, problem.whiten(g).norm().item(), decrement))


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
