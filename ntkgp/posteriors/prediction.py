"""From q(f) to p(y): moments, their split, entropy, samples and densities."""

import math
import warnings
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from ntkgp.likelihoods import Likelihood, Moments

__all__ = ["Latent", "Prediction", "predictive_of", "valid_covariance"]

_ROUNDING = 1e-2  # of the largest eigenvalue: negative ones down to this are repaired in silence


@dataclass(frozen=True)
class Latent:
    """q(f) of n points: Gaussian, or given by samples."""

    mean: Tensor | None = None  # (n, C)
    covariance: Tensor | None = None  # (n, C, C)
    samples: Tensor | None = None  # (S, n, C)

    def draw(self, num_samples: int, seed: int) -> Tensor:  # (S, n, C)
        """Return samples of f, the same for the same seed."""
        if self.samples is not None:
            return self.samples
        mean, covariance = self.gaussian
        generator = torch.Generator(mean.device).manual_seed(seed)
        noise = torch.randn(num_samples, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        return mean + (noise.transpose(0, 1) @ root_of(covariance).mT).transpose(0, 1)

    @property
    def gaussian(self) -> tuple[Tensor, Tensor]:
        """Mean and covariance."""
        if self.mean is None or self.covariance is None:
            raise ValueError("this latent distribution is known by samples only")
        return self.mean, self.covariance


def root_of(covariance: Tensor) -> Tensor:  # (n, C, C)
    """Return L with L Lᵀ = Σ, also for a singular Σ."""
    L, info = torch.linalg.cholesky_ex(covariance)
    if (info > 0).any():
        values, vectors = torch.linalg.eigh(covariance[info > 0])
        L = L.index_put((info > 0,), vectors * values.clamp(min=0).sqrt().unsqueeze(-2))
    return L


@dataclass(frozen=True, repr=False)
class Prediction:
    r"""p(y) at N points, C_y numbers each.

    By the law of total variance ``variance`` = ``epistemic`` + ``aleatoric``: the variance of E[y | f], which more
    data would remove, and the mean of Var[y | f], which they would not. For classes y is one-hot.
    """

    mean: Tensor  # (N, C_y)
    standard_error: Tensor  # (N, C_y), of the mean, from sampling f; zero in closed form
    _epistemic: Tensor | None
    _aleatoric: Tensor | None
    _likelihood: Likelihood
    _latents: Sequence[Latent]
    _link: str
    _num_samples: int
    _seed: int

    def __repr__(self) -> str:
        N, C = self.mean.shape
        samples = f", {self._num_samples} samples" if self._link == "mc" else ""
        return f"Prediction({N} points x {C} under {type(self._likelihood).__name__}, link={self._link!r}{samples})"

    @property
    def probs(self) -> Tensor:  # (N, C)
        """Class probabilities."""
        if not self._likelihood.discrete:
            raise AttributeError(f"a {type(self._likelihood).__name__} likelihood has no class probabilities; see mean")
        return self.mean

    @property
    def epistemic(self) -> Tensor:  # (N, C_y)
        """Var[E[y | f]]."""
        return self._split(self._epistemic)

    @property
    def aleatoric(self) -> Tensor:  # (N, C_y)
        """E[Var[y | f]]."""
        return self._split(self._aleatoric)

    @property
    def variance(self) -> Tensor:  # (N, C_y)
        """Var[y]."""
        if self._likelihood.discrete:
            return self.mean * (1 - self.mean)
        return self.epistemic + self.aleatoric

    def _split(self, part: Tensor | None) -> Tensor:
        if part is None:
            raise AttributeError(f'link="{self._link}" gives probabilities only: use "mc" to split their variance')
        return part

    @property
    def entropy(self) -> Tensor:  # (N,)
        """Entropy of y, in nats; differential for continuous y."""
        if self._likelihood.discrete:
            return self._likelihood.entropy(self.mean)
        parts = [self._likelihood.gaussian_entropy(*latent.gaussian) for latent in self._latents]
        return torch.cat(parts)

    def log_prob(self, y: Tensor) -> Tensor:  # (N, ...) -> (N,)
        """Return log p(y) of every point, all its outputs together.

        Raises:
            TypeError: if ``y`` is of the wrong dtype.
            ValueError: if it does not fit the likelihood or the points.
        """
        likelihood = self._likelihood
        y = likelihood.validate(y, self._num_outputs)
        if len(y) != len(self.mean):
            raise ValueError(f"y has {len(y)} points, but {len(self.mean)} were predicted")
        y = y.to(dtype=self.mean.dtype if y.is_floating_point() else y.dtype)
        if self._link == "exact":
            parts = y.split([len(latent.gaussian[0]) for latent in self._latents])
            pairs = zip(self._latents, parts, strict=True)
            return torch.cat([likelihood.gaussian_log_prob(part, *latent.gaussian) for latent, part in pairs])
        if self._link != "mc":
            return likelihood.log_prob_of_mean(y, self.mean)
        found, start = [], 0
        for i, latent in enumerate(self._latents):
            f = latent.draw(self._num_samples, self._seed + i)
            log_prob = likelihood.log_prob(y[start : start + f.shape[1]], f)  # (S, n)
            found.append(log_prob.logsumexp(0) - math.log(f.shape[0]))
            start += f.shape[1]
        return torch.cat(found)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:  # (n, N, *)
        """Draw y: f from q, then y from the likelihood."""
        if n < 1:
            raise ValueError(f"n must be at least 1, but is {n}")
        device = self.mean.device
        generator = generator or torch.Generator(device).manual_seed(self._seed)
        parts = []
        for latent in self._latents:
            f = latent.draw(n, int(torch.randint(1 << 62, (), generator=generator, device=device)))
            if latent.samples is not None:
                f = f[torch.randint(f.shape[0], (n,), generator=generator, device=device)]
            parts.append(self._likelihood.sample(f, generator))
        return torch.cat(parts, dim=1)

    @property
    def _num_outputs(self) -> int:
        first = self._latents[0]
        return int((first.samples if first.mean is None else first.mean).shape[-1])  # type: ignore[union-attr]


def valid_covariance(covariance: Tensor) -> Tensor:  # (..., d, d)
    """Return a symmetric matrix without negative eigenvalues; if more than rounding is repaired, a warning says so."""
    covariance = (covariance + covariance.mT) / 2
    bad = torch.linalg.cholesky_ex(covariance).info > 0
    if not bad.any():
        return covariance
    broken = covariance[bad] if bad.ndim else covariance
    values, vectors = torch.linalg.eigh(broken.detach())  # no graph: the derivatives of equal eigenvalues are infinite
    if (values[..., 0] < -_ROUNDING * values[..., -1].abs()).any():
        warnings.warn(
            f"{covariance.dtype} cannot resolve some posterior variances, which are tiny beside the prior's: they are "
            "set to zero where they came out negative; use float64 to see them",
            stacklevel=4,
        )
    repaired = broken - (vectors * values.clamp(max=0).unsqueeze(-2)) @ vectors.mT
    return covariance.index_put((bad,), repaired) if bad.ndim else repaired


def predictive_of(
    likelihood: Likelihood,
    latents: Iterable[Latent],
    link: str | None,
    num_samples: int,
    generator: torch.Generator,
) -> Prediction:
    """Integrate the likelihood over q(f).

    Raises:
        ValueError: if ``link`` is not one of the likelihood's.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, but is {num_samples}")
    if link is not None and link not in ("mc", *likelihood.links):
        raise ValueError(f"link must be one of {('mc', *likelihood.links)} for this likelihood, but is {link!r}")
    likelihood = deepcopy(likelihood)  # a prediction does not change when its posterior is tuned
    seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
    kept, moments = [], []
    for i, latent in enumerate(latents):
        if latent.samples is not None:
            link = "mc"
        link = likelihood.links[0] if link is None else link
        kept.append(latent)
        if link == "mc":
            moments.append(_sampled_moments(likelihood, latent.draw(num_samples, seed + i)))
        else:
            moments.append(likelihood.closed_form(*latent.gaussian, link))
    mean, error = torch.cat([m.mean for m in moments]), torch.cat([m.standard_error for m in moments])
    epistemic, aleatoric = _joined([m.epistemic for m in moments]), _joined([m.aleatoric for m in moments])
    return Prediction(mean, error, epistemic, aleatoric, likelihood, kept, link or "mc", num_samples, seed)


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if len(known) == len(parts) else None


def _sampled_moments(likelihood: Likelihood, f: Tensor) -> Moments:  # (S, n, C)
    mean, variance = likelihood.moments(f)
    S = f.shape[0]
    epistemic = mean.var(0, correction=1 if S > 1 else 0)
    return Moments(mean.mean(0), epistemic, variance.mean(0), (epistemic / S).sqrt())
