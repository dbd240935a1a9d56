"""What every likelihood p(y | f) offers, and how a user's own is made from its logarithm alone."""

import math
import warnings
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from torch import Tensor
from torch.distributions import Distribution

from ntkgp.likelihoods.blocks import SiteBlocks

__all__ = ["Expansion", "Likelihood", "Moments"]


@dataclass(frozen=True)
class Expansion:
    r"""log p(y | f) to second order at f: value, residual r and curvature Λ = R Rᵀ, weights included."""

    log_prob: Tensor  # (), summed over points
    r: Tensor  # (N, C)
    R: SiteBlocks  # (N, T, k, k'), k' at least the rank of Λ

    @property
    def curvature(self) -> SiteBlocks:
        """Λ."""
        return SiteBlocks(self.R.values @ self.R.values.mT)


@dataclass(frozen=True)
class Moments:
    """Mean of y and the two parts of its variance, point by point; None where a link does not tell them."""

    mean: Tensor  # (N, C_y)
    epistemic: Tensor | None  # Var[E[y | f]]
    aleatoric: Tensor | None  # E[Var[y | f]]
    standard_error: Tensor  # of the mean, from sampling


class Likelihood(gpytorch.likelihoods.Likelihood):
    r"""p(y | f) of a point with C latent values f.

    A likelihood of your own needs ``log_prob`` alone:

    .. code-block:: python

        class StudentT(ntkgp.likelihoods.Likelihood):
            def log_prob(self, y, f):  # (N, C), (..., N, C) -> (..., N)
                return torch.distributions.StudentT(4.0, f).log_prob(y).sum(-1)

    The rest follows by differentiation. Λ must be positive semidefinite: where the Hessian is not, the Fisher
    information takes its place, estimated from ``num_fisher_samples`` draws of ``sample``, and a warning says so.
    ``moments`` and ``sample`` are needed for predictions of y, not for a posterior over f.
    """

    num_fisher_samples = 64
    links: tuple[str, ...] = ("mc",)  # ways from a Gaussian over f to a distribution of y, the default first
    discrete = False  # whether the mean of y is a vector of class probabilities

    @abstractmethod
    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:  # (N, ...), (..., N, C) -> (..., N)
        """Return log p(y | f) of every point."""

    def moments(self, f: Tensor) -> tuple[Tensor, Tensor]:  # (..., N, C) -> twice (..., N, C_y)
        """Return mean and variance of y given f."""
        raise NotImplementedError(f"{type(self).__name__} defines no moments, so y cannot be predicted, only f")

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:  # (..., N, C) -> (..., N, *)
        """Draw y given f."""
        raise NotImplementedError(f"{type(self).__name__} defines no sample")

    def validate(self, y: Tensor, num_outputs: int) -> Tensor:  # (N, ...) -> (N, ...)
        """Return the targets in the form that the other methods take.

        Raises:
            TypeError: if ``y`` is not a tensor or of the wrong dtype.
            ValueError: if its shape or its values do not fit.
        """
        if not isinstance(y, Tensor):
            raise TypeError(f"y must be a tensor, but is a {type(y).__name__}")
        if y.is_floating_point() and not torch.isfinite(y).all():
            raise ValueError("y holds NaN or infinity; to leave values out, give them weight 0")
        return y

    def closed_form(self, mean: Tensor, covariance: Tensor, link: str) -> Moments:  # (N, C), (N, C, C)
        """Return the moments of y for Gaussian f by one of the links that need no samples."""
        raise ValueError(f"{type(self).__name__} has no link {link!r}")

    def entropy(self, mean: Tensor) -> Tensor:  # (N, C) -> (N,)
        """Return the entropy of discrete y with these probabilities."""
        raise NotImplementedError(f"{type(self).__name__} has no entropy in closed form")

    def gaussian_entropy(self, mean: Tensor, covariance: Tensor) -> Tensor:  # (N, C), (N, C, C) -> (N,)
        """Return the differential entropy of y for Gaussian f."""
        raise NotImplementedError(f"{type(self).__name__} has no entropy in closed form")

    def gaussian_log_prob(self, y: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:  # -> (N,)
        """Return log E[p(y | f)] for Gaussian f."""
        raise NotImplementedError(f"{type(self).__name__} has no predictive density in closed form")

    def log_prob_of_mean(self, y: Tensor, mean: Tensor) -> Tensor:  # (N, T), (N, C) -> (N,)
        """Return log p(y) of discrete y with these probabilities."""
        raise NotImplementedError(f"{type(self).__name__} is not determined by its mean")

    def curvature_atoms(self, num_outputs: int) -> Tensor | None:  # (number of atoms, C)
        """Return fixed diagonals Λ_j if Λ = Σ_j w_j Λ_j for any f, so that what is linear in Λ can be kept."""
        return None

    def curvature_coefficients(self) -> Tensor:  # (number of atoms,)
        """Return w, differentiable in the hyperparameters."""
        raise NotImplementedError(f"the curvature of {type(self).__name__} depends on f")

    def site_size(self, num_outputs: int) -> int:
        """Return k, how many outputs belong together: Λ is k x k blocks."""
        return num_outputs

    # Derivatives

    def residual(self, y: Tensor, f: Tensor) -> Tensor:  # (..., N, C)
        r"""Return r = :math:`\partial \log p(y \mid f) / \partial f`."""
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad():
            f = f if f.requires_grad else f.detach().requires_grad_()
            return torch.autograd.grad(self.log_prob(y, f).sum(), f, create_graph=differentiable)[0]

    def site_root(self, y: Tensor, f: Tensor) -> Tensor:  # (..., N, T, k, k')
        """Return R, site by site; with fewer columns than rows where Λ is always singular."""
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            raise NotImplementedError(
                f"the curvature of {type(self).__name__} is not differentiable in its hyperparameters: override "
                "site_root to learn them by evidence, or fix them with requires_grad_(False)"
            )
        values, vectors = torch.linalg.eigh(self._hessian(y, f))
        floor = -(torch.finfo(f.dtype).eps ** 0.5) * values[..., -1:].abs().clamp(min=1)
        if (values < floor).any():
            return self._fisher_root(f).unsqueeze(-3)
        return (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)).unsqueeze(-3)

    def curvature_root(self, y: Tensor, f: Tensor) -> Tensor:  # (..., N, C, C'), C' <= C
        """Return R with R Rᵀ = Λ, finite also where Λ is singular."""
        return SiteBlocks(self.site_root(y, f)).dense()

    def curvature(self, y: Tensor, f: Tensor) -> Tensor:  # (..., N, C, C)
        r"""Return Λ = :math:`-\partial^2 \log p(y \mid f) / \partial f^2`, positive semidefinite."""
        R = self.site_root(y, f)
        return SiteBlocks(R @ R.mT).dense()

    def _hessian(self, y: Tensor, f: Tensor) -> Tensor:  # (..., N, C, C)
        """Differentiate r once more: points do not meet, so C backward passes do for all."""
        with torch.enable_grad():
            f = f.detach().requires_grad_()
            r = torch.autograd.grad(self.log_prob(y, f).sum(), f, create_graph=True)[0]
            if not r.requires_grad:  # log p is linear in f
                return f.new_zeros(*f.shape, f.shape[-1])
            rows = [
                torch.autograd.grad(r[..., c].sum(), f, retain_graph=True, allow_unused=True)[0]
                for c in range(f.shape[-1])
            ]
        H = torch.stack([torch.zeros_like(f) if row is None else row for row in rows], dim=-2).detach()
        return -(H + H.mT) / 2

    def _fisher_root(self, f: Tensor) -> Tensor:  # (..., N, C, C)
        """Estimate E[r rᵀ] over labels of the model's own."""
        S = self.num_fisher_samples
        if type(self).sample is Likelihood.sample:
            raise NotImplementedError(
                f"the Hessian of {type(self).__name__} is not positive semidefinite here, and without a sample method "
                "its Fisher information cannot take its place"
            )
        warnings.warn(
            f"the Hessian of {type(self).__name__} is not positive semidefinite; "
            f"the Fisher information, estimated from {S} sampled labels, takes its place",
            stacklevel=3,
        )
        generator = torch.Generator(f.device).manual_seed(0)
        f = f.detach()
        F = torch.stack([_outer(self.residual(self.sample(f, generator), f).detach()) for _ in range(S)]).mean(0)
        values, vectors = torch.linalg.eigh(F)
        return vectors * values.clamp(min=0).sqrt().unsqueeze(-2)

    def expand(self, y: Tensor, f: Tensor, weights: Tensor | None = None) -> Expansion:
        """Return value, residual and root of Σ_n w_n log p(y_n | f_n).

        Args:
            y: targets as :meth:`validate` returned them.
            f: latent values, (N, C).
            weights: how many points each stands for, (N,), or by site, (N, T); a mask is a weight of 0.
        """
        R = self.site_root(y, f)
        if weights is not None:
            w = weights if weights.ndim == 2 else weights.unsqueeze(-1).expand(R.shape[:2])
            R = R * w.sqrt()[..., None, None]
        r = self.weighted_residual(y, f, weights)
        return Expansion(self.weighted_log_prob(y, f, weights), r, SiteBlocks(R))

    def weighted_residual(self, y: Tensor, f: Tensor, weights: Tensor | None = None) -> Tensor:  # (N, C)
        """Return w_n r_n."""
        r = self.residual(y, f)
        if weights is None:
            return r
        w = weights if weights.ndim == 2 else weights.unsqueeze(-1)
        return r * w.repeat(1, r.shape[-1] // w.shape[-1])

    def weighted_log_prob(self, y: Tensor, f: Tensor, weights: Tensor | None = None) -> Tensor:  # ()
        """Return Σ_n w_n log p(y_n | f_n)."""
        value = self.site_log_prob(y, f)
        if weights is not None:
            value = value * (weights if weights.ndim == 2 else weights.unsqueeze(-1))
        return value.sum()

    def site_log_prob(self, y: Tensor, f: Tensor) -> Tensor:  # (..., N, T)
        """Return log p(y | f) of every site."""
        return self.log_prob(y, f).unsqueeze(-1)

    # As GPyTorch calls it: latent distributions over N values (C = 1), or N x C

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:  # (..., N)
        """Return E[log p(y | f)] of every point, with the covariance between its outputs."""
        return self._sampled_log_prob(observations, function_dist).mean(0)

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:  # (..., N)
        """Return log E[p(y | f)] of every point, with the covariance between its outputs."""
        log_prob = self._sampled_log_prob(observations, function_dist)
        return log_prob.logsumexp(0) - math.log(log_prob.shape[0])

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y | f) at samples of f, the samples first."""
        f = latent_samples(function_dist, gpytorch.settings.num_likelihood_samples.value())
        return self.forward(f if isinstance(function_dist, MultitaskMultivariateNormal) else f.squeeze(-1))

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y | f) as a distribution."""
        raise NotImplementedError(f"{type(self).__name__} defines no distribution of y")

    def _sampled_log_prob(self, y: Tensor, q: MultivariateNormal) -> Tensor:  # (S, ..., N)
        f = latent_samples(q, gpytorch.settings.num_likelihood_samples.value())
        return self.log_prob(self._by_point(y, q), f)

    def _by_point(self, y: Tensor, q: MultivariateNormal) -> Tensor:
        """Give single-output targets, as GPyTorch writes them, their output dimension."""
        return y if isinstance(q, MultitaskMultivariateNormal) else y.unsqueeze(-1)


def latent_samples(q: MultivariateNormal, num_samples: int) -> Tensor:  # (S, ..., N, C)
    """Draw f of each point from q, its outputs together, point by point."""
    mean, blocks = point_marginals(q)
    L = torch.linalg.cholesky_ex(blocks).L if blocks.shape[-1] > 1 else blocks.clamp(min=0).sqrt()
    noise = torch.randn(num_samples, *mean.shape, dtype=mean.dtype, device=mean.device)
    return mean + (L @ noise.unsqueeze(-1)).squeeze(-1)


def point_marginals(q: MultivariateNormal) -> tuple[Tensor, Tensor]:  # (..., N, C), (..., N, C, C)
    """Return the mean of each point's outputs and their covariance."""
    if not isinstance(q, MultitaskMultivariateNormal):
        return q.mean.unsqueeze(-1), q.variance[..., None, None]
    N, C = q.event_shape
    index = (
        torch.arange(N * C, device=q.mean.device).view(N, C)
        if q._interleaved
        else (torch.arange(N * C, device=q.mean.device).view(C, N).mT)
    )
    rows, columns = index.unsqueeze(-1).expand(N, C, C), index.unsqueeze(-2).expand(N, C, C)
    covariance = q.lazy_covariance_matrix
    return q.mean, covariance[..., rows.reshape(-1), columns.reshape(-1)].unflatten(-1, (N, C, C))


def _outer(r: Tensor) -> Tensor:
    return r.unsqueeze(-1) * r.unsqueeze(-2)
