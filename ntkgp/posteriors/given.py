"""Every weight by itself, with a variance that was learnt elsewhere: what training with uncertainty ends in."""

from typing import Self

import torch
from torch import Tensor

from ntkgp.likelihoods import Likelihood, SiteBlocks
from ntkgp.posteriors.diagonal import DiagonalPosterior
from ntkgp.posteriors.model import LinearModel
from ntkgp.priors import Prior

__all__ = ["GivenDiagonalPosterior"]


class GivenDiagonalPosterior(DiagonalPosterior):
    r"""Σ = diag(h + 1/s₀)⁻¹ with h as it was given, not from the curvature of the training data.

    Under the prior it was learnt with, Σ is what was learnt; under another, h is what the data said, and evidence, γ
    and tuning are those of :class:`DiagonalPosterior`. Refinement moves the mean and leaves h alone.
    """

    method = "given"

    @classmethod
    def of(cls, model: LinearModel, prior: Prior, likelihood: Likelihood, variances: Tensor) -> Self:  # (P,)
        """Return the posterior with these variances.

        Args:
            model: the linear model at the posterior's mean.
            prior: without correlations.
            likelihood: p(y | f).
            variances: σ² of every weight.

        Raises:
            ValueError: if there are not P variances, or one is not positive and finite.
        """
        if variances.shape != (model.lin.num_params,):
            raise ValueError(f"variances must have shape ({model.lin.num_params},), but has {tuple(variances.shape)}")
        if not bool(((variances > 0) & torch.isfinite(variances)).all()):
            raise ValueError(
                f"variances must be positive and finite, but the smallest is {variances.min().item():.3g}, "
                f"the largest {variances.max().item():.3g}"
            )
        posterior = cls(model, prior, likelihood)
        with torch.no_grad():
            posterior._kept = (variances.reciprocal() - posterior._prior_variances().reciprocal()).unsqueeze(0)
        return posterior

    def _statistics(self) -> Tensor:  # (1, P)
        return self._kept

    def _atoms(self) -> None:
        """Return None: what was given belongs to the noise it was learnt with."""

    def _at(
        self,
        shift: Tensor | None,
        prior: Prior | None = None,
        likelihood: Likelihood | None = None,
        sites: SiteBlocks | None = None,
    ) -> Self:
        new = super()._at(shift, prior, likelihood, sites)
        new._kept = self._kept
        return new
