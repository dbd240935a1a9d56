r"""Gaussian variational refinement of the linear model.

The best Gaussian q satisfies :math:`S_0^{-1}(m - m_0) = J^\top E_q[r]` and
:math:`\Sigma = (J^\top E_q[\Lambda] J + S_0^{-1})^{-1}`, or its diagonal part for a diagonal Σ (Opper & Archambeau
2009; Khan et al. 2018). Both are reached by natural-gradient steps: the expectations at the current q give a new Λ, and
m moves by Σ times the gradient.
"""

from copy import deepcopy
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ntkgp.likelihoods import SiteBlocks, expected
from ntkgp.posteriors.full import FullPosterior
from ntkgp.posteriors.function_space import FunctionSpacePosterior
from ntkgp.posteriors.mode import Certificate
from ntkgp.posteriors.weight_space import WeightSpacePosterior

if TYPE_CHECKING:
    from ntkgp.posteriors.base import Posterior

__all__ = ["refine_variationally"]

P = TypeVar("P", bound="Posterior")


def refine_variationally(
    posterior: P, max_steps: int = 100, tolerance: float | None = None, num_samples: int = 512, seed: int = 0
) -> P:
    """Return the Gaussian variational posterior with the covariance structure of ``posterior``.

    Starts at the linear mode. Expectations over a site of one output are integrals over a line (quadrature); over
    several outputs they are averages over the same ``num_samples`` draws throughout, so that the iteration converges.

    Args:
        posterior: which model, and which structure.
        max_steps: when to give up; the certificate says whether it converged.
        tolerance: for the gradient norm and the relative change of Λ; 1e-8 in float64, 1e-4 in float32.
        num_samples: draws for sites of several outputs.
        seed: of the draws.
    """
    if tolerance is None:
        tolerance = 1e-8 if posterior.lin.dtype == torch.float64 else 1e-4
    with torch.no_grad():
        start = posterior.refine("laplace")
        return _iterated(start, max_steps, tolerance, num_samples, seed)


def _iterated(start: P, max_steps: int, tolerance: float, num_samples: int, seed: int) -> P:
    prior, likelihood, model = deepcopy(start.prior), deepcopy(start.likelihood), start.model
    delta = start.shift
    assert delta is not None
    sites = SiteBlocks(torch.cat([start._site_root(chunk).values for chunk in model]))
    rate, norm, before, steps, converged = 1.0, float("inf"), float("inf"), 0, False
    current = start._at(delta, prior, likelihood, sites)
    while steps < max_steps and not converged:
        residuals, curvatures = _expectations(current, delta, num_samples, seed)
        gradient = current._gradient(delta, lambda chunk: residuals[chunk.points])  # noqa: B023
        norm = prior.whiten(gradient).norm().item()
        old = sites.values @ sites.values.mT
        change = ((curvatures - old).norm() / curvatures.norm().clamp(min=1e-300)).item()
        converged = norm <= tolerance and change <= tolerance
        if converged:
            break
        if norm + change > before:
            rate = max(rate / 2, 1 / 64)
        before = norm + change
        sites = SiteBlocks(psd_root((1 - rate) * old + rate * curvatures))
        current = start._at(delta, prior, likelihood, sites)
        delta = delta + rate * _mean_step(current, gradient)
        current.shift = delta  # Λ is that of the sites, wherever the mean is: what was factored stays
        steps += 1
    current.certificate = Certificate(converged, steps, norm, float("nan"))
    return current


def _mean_step(posterior: "Posterior", g: Tensor) -> Tensor:  # (P,)
    """Return (Jᵀ Λ J + S₀⁻¹)⁻¹ g, whatever the structure of Σ."""
    if isinstance(posterior, FunctionSpacePosterior | FullPosterior):
        return posterior._covariance_times(g.unsqueeze(0))[0]
    assert isinstance(posterior, WeightSpacePosterior)
    return posterior._solve(g.unsqueeze(0), posterior._site_root, torch.finfo(g.dtype).eps ** 0.5).x[0]


def _expectations(posterior: "Posterior", delta: Tensor, num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return E_q[r], (N, C), and E_q[Λ], (N, T, k, k), at the training points."""
    residuals, curvatures = [], []
    for chunk in posterior.model:
        mean, blocks, data = posterior._moved(chunk, delta), posterior._blocks(chunk.F), chunk.data
        E = expected(posterior.likelihood, data.y, mean, blocks, data.weights, num_samples, seed)
        residuals.append(E.r)
        curvatures.append(E.curvature.values)
    return torch.cat(residuals), torch.cat(curvatures)


def psd_root(curvatures: Tensor) -> Tensor:  # (..., k, k)
    """Return R with R Rᵀ = Λ for positive semidefinite Λ."""
    if curvatures.shape[-1] == 1:
        return curvatures.clamp(min=0).sqrt()
    values, vectors = torch.linalg.eigh(curvatures)
    return vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
