"""Covariances that were learnt elsewhere: what training with uncertainty ends in."""

from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from ntkgp.curvature.kronecker import KroneckerBlock
from ntkgp.likelihoods import Likelihood, SiteBlocks
from ntkgp.posteriors.diagonal import DiagonalPosterior
from ntkgp.posteriors.kronecker import KroneckerPosterior
from ntkgp.posteriors.model import LinearModel
from ntkgp.posteriors.weight_space import BlockPosterior
from ntkgp.priors import Prior

__all__ = ["GivenDiagonalPosterior", "GivenKroneckerPosterior"]


class _Given(BlockPosterior):
    """Statistics as they were given, not from the training data.

    Under the prior it was learnt with, Σ is what was learnt; under another, the curvature is what the data said, and
    evidence, γ and tuning are those of its structure. Refinement moves the mean and leaves the curvature alone. Where
    Λ = w Λ_1, as for one Gaussian noise, it follows w; else it belongs to the likelihood it was learnt with.
    """

    def _statistics(self) -> Any:
        if torch.is_grad_enabled() and any(p.requires_grad for p in self._curvature_parameters()):
            raise NotImplementedError(
                f"a curvature that was given does not follow the hyperparameters of {type(self.likelihood).__name__}: "
                "fix them with requires_grad_(False)"
            )
        return self._kept

    def _atoms(self) -> Tensor | None:  # (1, C)
        atoms = super()._atoms()
        return atoms if atoms is not None and len(atoms) == 1 else None

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


class GivenDiagonalPosterior(_Given, DiagonalPosterior):
    r"""Σ = diag(h + 1/s₀)⁻¹ with h as it was given."""

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
            h = variances.reciprocal() - posterior._prior_variances().reciprocal()
            posterior._kept = (h / posterior._coefficients()).unsqueeze(0)
        return posterior


class GivenKroneckerPosterior(_Given, KroneckerPosterior):
    r"""Σ = (G ⊗ A + S₀⁻¹)⁻¹ for each layer, with G and A as they were given."""

    method = "given_kron"

    @classmethod
    def of(cls, model: LinearModel, prior: Prior, likelihood: Likelihood, blocks: dict[str, KroneckerBlock]) -> Self:
        """Return the posterior with these factors.

        Args:
            model: the linear model at the posterior's mean.
            prior: one that keeps Kronecker structure.
            likelihood: p(y | f).
            blocks: by parameter, in the order in which it is stored; those without one keep their prior.

        Raises:
            ValueError: if a block is of no parameter, or does not fit it.
        """
        posterior = cls(model, prior, likelihood)
        sizes = dict(zip(model.lin.layout.names, model.lin.layout.sizes, strict=True))
        for name, block in blocks.items():
            if name not in sizes:
                raise ValueError(f"blocks names {name!r}, which is not a parameter of the network")
            found = block.G.shape[-1] * (1 if block.A is None else block.A.shape[-1])
            if found != sizes[name]:
                raise ValueError(f"blocks[{name!r}] must be for {sizes[name]} numbers, but is for {found}")
        with torch.no_grad():
            (w,) = posterior._coefficients()
            posterior._kept = {name: replace(block, G=block.G / w) for name, block in blocks.items()}
        return posterior
