"""Classification: independent binary labels, and one of K classes."""

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliDistribution
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid

from ntkgp.likelihoods.base import Moments, point_marginals
from ntkgp.likelihoods.blocks import from_sites, to_sites
from ntkgp.likelihoods.factorized import ScalarLikelihood, TemperedLikelihood
from ntkgp.likelihoods.links import bridge, probit_bernoulli, probit_categorical

__all__ = ["Bernoulli", "Categorical"]


class Bernoulli(TemperedLikelihood, ScalarLikelihood):
    r"""p(y = 1) = σ(f / τ), one independent label for each output; Λ = σ(f / τ) σ(−f / τ) / τ².

    Args:
        temperature: τ.
    """

    links = ("mc", "probit")
    discrete = True

    def _log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        f = f.squeeze(-1)
        return y * logsigmoid(f) + (1 - y) * logsigmoid(-f)

    def _residual(self, y: Tensor, f: Tensor) -> Tensor:
        return y.unsqueeze(-1) - f.sigmoid()

    def _root(self, f: Tensor) -> Tensor:
        return ((logsigmoid(f) + logsigmoid(-f)) / 2).exp().unsqueeze(-1)

    def validate(self, y: Tensor, num_outputs: int) -> Tensor:  # (N, ...) -> (N, C)
        """Return the labels as floating-point numbers.

        Raises:
            ValueError: if they are not 0 and 1, or their shape does not fit.
        """
        y = super().validate(y, num_outputs)
        if bool(((y != 0) & (y != 1)).any()):
            raise ValueError(f"y must hold labels 0 and 1, but has values from {y.min()} to {y.max()}")
        return y if y.is_floating_point() else y.to(torch.get_default_dtype())

    def moments(self, f: Tensor) -> tuple[Tensor, Tensor]:  # (..., N, C)
        """Return p and p (1 − p)."""
        p = (f / self.temperature).sigmoid()
        return p, p * (1 - p)

    def closed_form(self, mean: Tensor, covariance: Tensor, link: str) -> Moments:  # (N, C), (N, C, C)
        """Return the probabilities of the probit link."""
        tau = self.temperature
        p = probit_bernoulli(mean / tau, covariance.diagonal(dim1=-2, dim2=-1) / tau**2)
        return Moments(p, None, None, torch.zeros_like(p))

    def entropy(self, mean: Tensor) -> Tensor:  # (N, C) -> (N,)
        """Return the entropies of all labels, as if they were independent."""
        return (torch.special.entr(mean) + torch.special.entr(1 - mean)).sum(-1)

    def log_prob_of_mean(self, y: Tensor, mean: Tensor) -> Tensor:  # (N, C), (N, C) -> (N,)
        """Return log p(y) of labels with these probabilities."""
        return (torch.xlogy(y, mean) + torch.xlogy(1 - y, 1 - mean)).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:  # (..., N, C)
        """Draw y given f."""
        return torch.bernoulli(self.moments(f)[0], generator=generator)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return Bernoulli(σ(f / τ))."""
        return BernoulliDistribution(logits=function_samples / self.temperature)

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Distribution:
        """Return the distribution of each label by itself."""
        mean, blocks = point_marginals(function_dist)
        p = self._expectation(lambda f: self.moments(f)[0], mean, blocks).clamp(0, 1)
        return BernoulliDistribution(probs=p.view(function_dist.mean.shape))


class Categorical(TemperedLikelihood):
    r"""p(y = k) = softmax(f / τ)_k.

    Λ = (diag(p) − p pᵀ) / τ² = R Rᵀ has rank K − 1, and R as many columns: with u = √p, a unit vector, I − u uᵀ = H Hᵀ
    for the first K − 1 columns H of the reflection that takes u to the last axis, and R = diag(u) H / τ is finite for
    any p.

    Args:
        num_classes: K; None if all outputs are the logits of one label. With fewer classes than outputs there is a
            label for each of T = C / K pixels, as in a network that returns (N, K, height, width).
        temperature: τ.
    """

    links = ("mc", "probit", "bridge")
    discrete = True

    def __init__(self, num_classes: int | None = None, temperature: float = 1.0) -> None:
        super().__init__(temperature)
        if num_classes is not None and num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, but is {num_classes}")
        self.num_classes = num_classes

    def site_size(self, num_outputs: int) -> int:
        """Return K."""
        return num_outputs if self.num_classes is None else self.num_classes

    def _log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        log_p = f.log_softmax(-1)
        return log_p.gather(-1, y.expand(log_p.shape[:-1]).unsqueeze(-1)).squeeze(-1)

    def _residual(self, y: Tensor, f: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(y, f.shape[-1]) - f.softmax(-1)

    def _root(self, f: Tensor) -> Tensor:
        u = (f.log_softmax(-1) / 2).exp()
        axis = torch.zeros_like(u)
        axis[..., -1] = 1
        v = u + axis  # u is not negative: no cancellation, |v|² = 2 (1 + u_K)
        H = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device) - v[..., :, None] * v[..., None, :] / (
            1 + u[..., -1:, None]
        )
        return u.unsqueeze(-1) * H[..., :-1]

    def validate(self, y: Tensor, num_outputs: int) -> Tensor:  # (N, ...) -> (N, T)
        """Return the labels, one for each site.

        Raises:
            TypeError: if they are not integers.
            ValueError: if one is out of range, or their shape does not fit.
        """
        if num_outputs < 2:
            raise ValueError("a categorical likelihood needs two outputs or more; for one logit, use bernoulli")
        y = super().validate(y, num_outputs)
        if y.is_floating_point() or y.dtype == torch.bool:
            raise TypeError(f"y must hold integer class indices, but has dtype {y.dtype}")
        K = self.site_size(num_outputs)
        if y.numel() and (y.min() < 0 or y.max() >= K):
            raise ValueError(f"y must hold classes from 0 to {K - 1}, but has values from {y.min()} to {y.max()}")
        return y.long()

    def moments(self, f: Tensor) -> tuple[Tensor, Tensor]:  # (..., N, C)
        """Return p and p (1 − p), class by class."""
        p = from_sites(self._sites(f).softmax(-1))
        return p, p * (1 - p)

    def closed_form(self, mean: Tensor, covariance: Tensor, link: str) -> Moments:  # (N, C), (N, C, C)
        """Return the probabilities of the probit link, or those of the bridge and their variance."""
        m, S = self._sites(mean), self._site_covariance(covariance / self.temperature**2)  # (N, T, K), (N, T, K, K)
        if link == "probit":
            p = from_sites(probit_categorical(m, S))
            return Moments(p, None, None, torch.zeros_like(p))
        alpha = bridge(m, S)
        total = alpha.sum(-1, keepdim=True)
        p = alpha / total
        epistemic = from_sites(p * (1 - p) / (total + 1))
        p = from_sites(p)
        return Moments(p, epistemic, p * (1 - p) - epistemic, torch.zeros_like(p))

    def _site_covariance(self, covariance: Tensor) -> Tensor:  # (N, C, C) -> (N, T, K, K)
        K = self.site_size(covariance.shape[-1])
        return covariance.unflatten(-1, (K, -1)).unflatten(-3, (K, -1)).diagonal(dim1=-3, dim2=-1).movedim(-1, -3)

    def entropy(self, mean: Tensor) -> Tensor:  # (N, C) -> (N,)
        """Return the entropies of all sites, as if they were independent."""
        return torch.special.entr(mean).sum(-1)

    def log_prob_of_mean(self, y: Tensor, mean: Tensor) -> Tensor:  # (N, T), (N, C) -> (N,)
        """Return log p(y) of labels with these probabilities."""
        probs = to_sites(mean, self.site_size(mean.shape[-1]))
        return probs.gather(-1, y.unsqueeze(-1)).log().sum((-1, -2))

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:  # (..., N, T)
        """Draw y given f."""
        p = self._sites(f).softmax(-1)
        return torch.multinomial(p.reshape(-1, p.shape[-1]), 1, generator=generator).view(p.shape[:-1])

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return Categorical(softmax(f / τ)), of each point or, if there are several sites, of each site."""
        sites = self._sites(function_samples)
        return CategoricalDistribution(logits=sites.squeeze(-2) if sites.shape[-2] == 1 else sites)

    def _by_point(self, y: Tensor, q: MultivariateNormal) -> Tensor:
        return y if y.ndim == q.mean.ndim else y.unsqueeze(-1)
