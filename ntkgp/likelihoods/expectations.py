"""A likelihood averaged over Gaussians: E[log p], E[r] and E[Λ], what variational methods are made of."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

from ntkgp.likelihoods.base import Likelihood
from ntkgp.likelihoods.blocks import SiteBlocks, from_sites

__all__ = ["TOGETHER", "Expectation", "expected", "nodes_and_weights"]

_QUADRATURE = 32  # nodes on a line
TOGETHER = 1 << 24  # numbers in the curvatures of the nodes that are evaluated together


@dataclass(frozen=True)
class Expectation:
    r"""Σ_n w_n E[log p(y_n | f_n)] for independent Gaussian f_n, and its derivatives in their means and covariances.

    With respect to a mean it is E[r], with respect to a covariance −½ E[Λ] (Bonnet's and Price's theorems).
    """

    log_prob: Tensor  # (), differentiable in the hyperparameters of the likelihood
    standard_error: float  # of log_prob, from sampling; 0 by quadrature
    r: Tensor  # (N, C)
    curvature: SiteBlocks  # E[Λ], (N, T, k, k)


def expected(
    likelihood: Likelihood,
    y: Tensor,
    mean: Tensor,
    blocks: Tensor,
    weights: Tensor | None = None,
    num_samples: int = 512,
    seed: int = 0,
) -> Expectation:
    """Average log p, r and Λ over f_n ~ N(mean_n, blocks_n).

    Sites of one output are integrated by Gauss-Hermite quadrature, each by itself; larger ones by antithetic draws.

    Args:
        likelihood: p(y | f).
        y: targets as its ``validate`` returned them.
        mean: (N, C).
        blocks: (N, C, C); only what is within a site matters.
        weights: how many points each stands for, (N,), or by site, (N, T).
        num_samples: draws for sites of several outputs.
        seed: of the draws.
    """
    mean, blocks = mean.detach(), blocks.detach()
    nodes, node_weights, moved = nodes_and_weights(likelihood, blocks, num_samples, seed)
    w = None if weights is None else (weights if weights.ndim == 2 else weights.unsqueeze(-1))
    log_probs, r, curvature = [], torch.zeros_like(mean), torch.zeros(())
    step = max(1, TOGETHER // blocks.numel())
    for some, v in zip(nodes.split(step), node_weights.split(step), strict=True):
        f = mean + moved(some)  # (S, N, C)
        log_prob = likelihood.site_log_prob(y, f)
        log_probs.append((log_prob if w is None else log_prob * w).sum((-1, -2)))
        with torch.no_grad():
            r = r + torch.tensordot(v, likelihood.weighted_residual(y, f, weights), 1)
            R = likelihood.site_root(y, f)  # (S, N, T, k, k')
            curvature = curvature.to(v) + torch.tensordot(v, R @ R.mT, 1)
    totals = torch.cat(log_probs)
    if w is not None:
        curvature = curvature * w[..., None, None]
    drawn = likelihood.site_size(mean.shape[-1]) > 1
    pairs = totals.detach().view(2, -1).mean(0)  # antithetic draws are no two
    error = (pairs.std() / len(pairs) ** 0.5).item() if drawn and len(pairs) > 1 else 0.0
    return Expectation(node_weights @ totals, error, r, SiteBlocks(curvature))


def nodes_and_weights(
    likelihood: Likelihood, blocks: Tensor, num_samples: int, seed: int
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:  # blocks: (N, C, C)
    """Return how to average over Gaussians with these covariances: nodes, weights, and nodes -> f − mean, (S, N, C)."""
    k = likelihood.site_size(blocks.shape[-1])
    if k == 1:
        x, w = hermegauss(_QUADRATURE)
        std = blocks.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
        return std.new_tensor(x).view(-1, 1, 1), std.new_tensor(w / w.sum()), lambda nodes: nodes * std
    sites = blocks.unflatten(-1, (k, -1)).unflatten(-3, (k, -1)).diagonal(dim1=-3, dim2=-1).movedim(-1, -3)
    values, vectors = torch.linalg.eigh(sites)  # (N, T, k, k)
    # Symmetric: eigenvectors change sign and order from one call to the next, and the draws would change with them.
    root = (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.mT
    generator = torch.Generator(blocks.device).manual_seed(seed)
    shape = (num_samples + 1) // 2, *sites.shape[:-1]
    half = torch.randn(shape, generator=generator, dtype=torch.float64, device=blocks.device)  # the same in any dtype
    draws = torch.cat([half, -half]).to(blocks.dtype)  # antithetic
    return (
        draws,
        draws.new_full((len(draws),), 1 / len(draws)),
        lambda nodes: from_sites((root @ nodes.unsqueeze(-1)).squeeze(-1)),
    )
