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
        r"""Return v -> (S₀⁻¹ + W Wᵀ)⁻¹ v.

        It is L (I − U Uᵀ + U diag(1 + s²)⁻¹ Uᵀ) Lᵀ v, with S₀ = L Lᵀ and U, s the singular vectors and values of Lᵀ W.
        Woodbury's identity takes a difference that has no digits left in single precision where s² is large, and may
        be negative. Here what is orthogonal to U is made so twice, and everything is positive to rounding. U is found
        in double precision: an error e of its span leaves e² of what was to shrink by 1 + s², and factorisations in
        single precision have an e of some tens of ε, which left no digit from s = 10⁶ on.
        """
        Q, R = torch.linalg.qr(prior.whiten(self.W).mT.double())
        rotation, s, _ = torch.linalg.svd(R)
        U, shrink = (Q @ rotation).mT.to(self.W), (1 / (1 + s**2)).to(self.W)  # (k, P), (k,)

        def precondition(v: Tensor) -> Tensor:  # (S, P)
            z = prior.whiten(v)
            c = z @ U.mT
            rest = z - c @ U
            rest = rest - (rest @ U.mT) @ U
            return prior.spread(rest + (c * shrink) @ U)

        return precondition
