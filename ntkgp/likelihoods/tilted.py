r"""Powers of a likelihood averaged over Gaussians: (1/α) log E[p^α], between the variational and the predictive."""

import torch
from torch import Tensor

from ntkgp.likelihoods.base import Likelihood
from ntkgp.likelihoods.blocks import SiteBlocks, from_sites, to_sites
from ntkgp.likelihoods.expectations import TOGETHER, Expectation, nodes_and_weights

__all__ = ["tilted"]

_NEWTON = 20  # steps to the mode of the tilted Gaussian, around which it is integrated


def tilted(
    likelihood: Likelihood,
    y: Tensor,
    mean: Tensor,
    blocks: Tensor,
    alpha: float,
    weights: Tensor | None = None,
    num_samples: int = 512,
    seed: int = 0,
) -> Expectation:
    r"""Return Σ w (1/α) log E[p(y | f)^α] over sites, f_n ~ N(mean_n, blocks_n), and its derivatives.

    With α → 0 this is E[log p], with α = 1 the logarithm of the predictive probability of each site (Hernández-Lobato
    et al. 2016; Li & Gal 2017). Let ω be the Gaussian tilted by p^α: the derivative in the mean is E_ω[r], and that in
    the covariance −½ E_ω[Λ − α r rᵀ] (Price's theorem for p^α), which ``curvature`` holds; it may be indefinite.

    Args:
        likelihood: p(y | f).
        y: targets as its ``validate`` returned them.
        mean: (N, C).
        blocks: (N, C, C); only what is within a site matters.
        alpha: α, above 0 and at most 1.
        weights: how many points each stands for, (N,), or by site, (N, T).
        num_samples: draws for sites of several outputs; those of one are integrated by quadrature around the mode.
        seed: of the draws.
    """
    mean, blocks = mean.detach(), blocks.detach()
    k = likelihood.site_size(mean.shape[-1])
    f, log_v = _nodes(likelihood, y, mean, blocks, alpha, num_samples, seed)  # (S, N, C), (S, N, T)
    log_power = alpha * likelihood.site_log_prob(y, f) + log_v
    value = log_power.logsumexp(0) / alpha  # (N, T)
    w = torch.ones_like(value) if weights is None else weights.view(len(weights), -1).expand_as(value)
    with torch.no_grad():
        omega = log_power.softmax(0)
        r = torch.einsum("snt,sntk->ntk", omega, to_sites(likelihood.residual(y, f), k))
        curvature = torch.zeros(*r.shape, k).to(r)
        step = max(1, TOGETHER // blocks.numel())
        for some, share in zip(f.split(step), omega.split(step), strict=True):
            R, at = likelihood.site_root(y, some), to_sites(likelihood.residual(y, some), k).unsqueeze(-1)
            curvature += ((R @ R.mT - alpha * at @ at.mT) * share[..., None, None]).sum(0)
        ratio = (omega * len(omega)).view(2, -1, *value.shape).mean(0)  # antithetic draws are no two
        variance = (w / alpha).square() * ratio.var(0) / len(ratio) if k > 1 and len(ratio) > 1 else 0 * value
    return Expectation(
        (w * value).sum(),
        variance.sum().sqrt().item(),
        from_sites(w.unsqueeze(-1) * r),
        SiteBlocks(w[..., None, None] * curvature),
    )


def _nodes(
    likelihood: Likelihood, y: Tensor, mean: Tensor, blocks: Tensor, alpha: float, num_samples: int, seed: int
) -> tuple[Tensor, Tensor]:  # (S, N, C), (S, N, T)
    """Return where to average over the Gaussians, and the logarithms of the weights."""
    nodes, v, moved = nodes_and_weights(likelihood, blocks, num_samples, seed)
    if likelihood.site_size(mean.shape[-1]) > 1:
        return mean + moved(nodes), v.log().view(-1, 1, 1)
    with torch.no_grad():
        variance = blocks.diagonal(dim1=-2, dim2=-1).clamp(min=torch.finfo(mean.dtype).tiny ** 0.5)
        centre, std = _mode(likelihood, y, mean, variance, alpha)
        f = centre + nodes * std
        # N(f; mean, variance) in units of the Gaussian that the nodes are for
        shift = (nodes.square() - (f - mean).square() / variance) / 2 + (std / variance.sqrt()).log()
        return f, v.log().view(-1, 1, 1) + shift


def _mode(
    likelihood: Likelihood, y: Tensor, mean: Tensor, variance: Tensor, alpha: float
) -> tuple[Tensor, Tensor]:  # (N, C) -> twice (N, C)
    """Return mode and standard deviation of N(f; mean, variance) p(y | f)^α, one output a site.

    Where p is narrow beside the Gaussian, quadrature around the mean would miss it.
    """
    f, longest = mean, 1 + variance.sqrt()
    for _ in range(_NEWTON):
        R = likelihood.site_root(y, f)  # (N, C, 1, 1)
        pull = 1 + alpha * variance * (R @ R.mT)[..., 0, 0]
        step = (alpha * variance * likelihood.residual(y, f) - (f - mean)) / pull
        f = f + step.clamp(-longest, longest)
    R = likelihood.site_root(y, f)
    return f, (variance / (1 + alpha * variance * (R @ R.mT)[..., 0, 0])).sqrt()
