"""A random sketch of the curvature as a preconditioner: a new prior costs no product with the data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ntkgp.priors import Prior
from ntkgp.solvers import Nystrom, Product

__all__ = ["Sketch"]


@dataclass(frozen=True)
class Sketch:
    """Jᵀ Λ J ≈ W Wᵀ, of rank k."""

    W: Tensor  # Wᵀ, (k, P)

    @classmethod
    def of(cls, curvature: Product, prior: Prior, rank: int, together: int, generator: torch.Generator) -> "Sketch":
        """Return a Nyström approximation, sketched in the coordinates of the prior of the time.

        Args:
            curvature: v -> Jᵀ Λ J v, (S, P).
            prior: N(m₀, S₀).
            rank: k, and how many products are made.
            together: how many of them at a time.
            generator: where randomness comes from.
        """

        def whitened(z: Tensor) -> Tensor:  # S₀^½ᵀ Jᵀ Λ J S₀^½ z, (k, P)
            return torch.cat([prior.whiten(curvature(prior.spread(part))) for part in z.split(together)])

        found = Nystrom.sketch(whitened, prior.mean, len(prior.mean), rank, generator)
        return cls(found.eigenvalues.sqrt().unsqueeze(1) * prior.precision_times(prior.spread(found.U)))

    def scaled(self, factor: Tensor) -> "Sketch":
        """Return the sketch for factor² Λ."""
        return Sketch(self.W * factor)

    def preconditioner(self, prior: Prior) -> Product:
        """Return v -> (S₀⁻¹ + W Wᵀ)⁻¹ v, by Woodbury's identity."""
        W = self.W
        B = W @ prior.covariance_times(W).mT
        B.diagonal().add_(1)
        L = torch.linalg.cholesky(B)

        def precondition(v: Tensor) -> Tensor:  # (S, P)
            Sv = prior.covariance_times(v)
            return Sv - prior.covariance_times(torch.cholesky_solve(W @ Sv.mT, L).mT @ W)

        return precondition
