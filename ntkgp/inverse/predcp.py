r"""The TV-PredCP hyperprior: filters may be as smooth as images have little total variation.

An exponential prior on the expected total variation κ of images under the prior, carried over to lengthscales by a
change of variables (Nalisnick et al. 2021; Antorán, Barbano et al. 2022).
"""

import math
from typing import Any

import torch
from gpytorch.priors import Prior as HyperPrior
from torch import Tensor
from torch.distributions import constraints

from ntkgp.inverse.total_variation import differences
from ntkgp.priors import ConvFilterGP

__all__ = ["ExpectedVariation", "PredCP", "add_predcp"]


class ExpectedVariation:
    r"""κ_d = E[TV(x)] for x ~ N(f*, J_d S_d J_dᵀ): the filters of one block are random, all others at θ*.

    Differences D x are Gaussian with means μ = D f* and variances v = diag(D J_d S_d J_dᵀ Dᵀ), so

    .. math:: \kappa_d = \sum_i \sqrt{\tfrac{2 v_i}{\pi}}\, e^{-\mu_i^2 / 2 v_i}
       + \mu_i \operatorname{erf}\!\big(\mu_i / \sqrt{2 v_i}\big)

    and v is linear in σ_d² exp(−δ/ℓ_d), with coefficients that are computed once.

    Args:
        prior: over the weights.
        K: Gram matrices over pixels of the prior's atoms, (number of atoms, H W, H W).
        image: f*, (H, W).
    """

    def __init__(self, prior: ConvFilterGP, K: Tensor, image: Tensor) -> None:
        self.mu = differences(image)
        self.variances: list[Tensor] = []  # for every block v of each distance, (distances, differences)
        with torch.no_grad():
            found: dict[str, list[Tensor]] = {block: [] for block in prior.filters}
            of = {name: block for block, names in prior.blocks.items() for name in names}
            for atom, K_j in zip(prior.atoms, K, strict=True):
                if (block := of[next(iter(atom))]) in found:
                    found[block].append(_difference_variances(K_j, image.shape))
        self.variances = [torch.stack(parts) for parts in found.values()]

    def __call__(self, prior: ConvFilterGP) -> Tensor:  # (2, number of blocks)
        """Return κ and ∂κ/∂ log ℓ, block by block; differentiable in σ² and ℓ."""
        columns = []
        sigma2 = dict(zip(prior.blocks, prior.variance.unbind(), strict=True))
        for (block, V), ell in zip(zip(prior.filters, self.variances, strict=True), prior.lengthscale, strict=True):
            delta = prior.grid_distances(block).unique().to(V)
            w = sigma2[block] * torch.exp(-delta / ell)
            v, slope = w @ V, (w * delta / ell) @ V
            tiny = torch.finfo(v.dtype).tiny
            root = v.clamp(min=tiny).sqrt()
            peak = math.sqrt(2 / math.pi) * torch.exp(-(self.mu**2) / (2 * root**2))
            kappa = (root * peak + self.mu * torch.erf(self.mu / (math.sqrt(2) * root))).sum()
            columns.append(torch.stack([kappa, (peak / (2 * root) * slope).sum()]))
        return torch.stack(columns, dim=1)


def _difference_variances(K: Tensor, shape: torch.Size) -> Tensor:  # (H W, H W) -> (differences,)
    """Return diag(D K Dᵀ)."""
    half = differences(K.unflatten(1, shape))  # K Dᵀ
    return differences(half.mT.unflatten(1, shape)).diagonal()


class PredCP(HyperPrior):
    r"""log p(ℓ) = Σ_d log |∂κ_d/∂ log ℓ_d| − λ κ_d, as GPyTorch's hyperpriors are: it adds to the evidence.

    Args:
        rate: λ; γ d_y / (2 σ²) matches a mean squared error with γ times the total variation.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012
    support = constraints.positive
    _validate_args = False

    def __init__(self, rate: float) -> None:
        super().__init__(validate_args=False)
        if not rate > 0:
            raise ValueError(f"rate must be positive, but is {rate}")
        self.rate = rate

    def log_prob(self, value: Tensor) -> Tensor:  # (2, d) -> (d,)
        """Return the log density of each lengthscale, given κ and its derivative, up to a constant."""
        kappa, slope = value
        return slope.abs().clamp(min=torch.finfo(slope.dtype).tiny).log() - self.rate * kappa

    def rsample(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refuse: it is known only up to a constant."""
        raise NotImplementedError("PredCP is a density over lengthscales known up to a constant, and cannot be sampled")


def add_predcp(prior: ConvFilterGP, K: Tensor, image: Tensor, rate: float) -> None:  # (H, W)
    """Register the hyperprior, so that tuning by evidence becomes type-II MAP."""
    kappa = ExpectedVariation(prior, K, image)
    prior.register_prior("predcp", PredCP(rate), lambda module: kappa(module))
