"""A preconditioner from a random sketch: the leading eigenvectors, and one number for the rest."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from ntkgp.solvers.cg import Product

__all__ = ["Nystrom"]


@dataclass(frozen=True)
class Nystrom:
    r"""A ≈ U diag(λ) Uᵀ of rank k, for systems (A + μ I) x = b.

    From a sketch Y = A Ω of a positive semidefinite matrix with orthonormal Ω the best matrix with that sketch is
    Y (Ωᵀ Y)⁻¹ Yᵀ. A shift of ν = ε ‖Y‖, taken off the eigenvalues again, keeps the small factorisation from breaking
    down (Frangella, Tropp & Udell 2023, algorithm 2.1). All of it is symmetric, so its eigenvectors are orthogonal.
    """

    U: Tensor  # (k, n), orthonormal rows
    eigenvalues: Tensor  # (k,), descending

    @classmethod
    def sketch(cls, A: Product, like: Tensor, n: int, rank: int, generator: torch.Generator | None = None) -> "Nystrom":
        """Multiply A with ``rank`` random vectors.

        Args:
            A: v -> A v, positive semidefinite, (S, n) -> (S, n).
            like: for dtype and device.
            n: its size.
            rank: k, at most n.
            generator: where randomness comes from.

        Raises:
            ValueError: if ``rank`` is not between 1 and n.
        """
        if not 1 <= rank <= n:
            raise ValueError(f"rank must be between 1 and {n}, but is {rank}")
        noise = torch.randn(n, rank, generator=generator, dtype=like.dtype, device=like.device)
        omega = torch.linalg.qr(noise).Q.mT  # (k, n)
        Y = A(omega).double()
        omega = omega.double()
        shift = torch.finfo(like.dtype).eps * Y.norm()
        Y = Y + shift * omega
        M = omega @ Y.mT
        L = torch.linalg.cholesky((M + M.mT) / 2)
        _, values, U = torch.linalg.svd(solve_triangular(L, Y, upper=False), full_matrices=False)
        return cls(U.to(like.dtype), (values.square() - shift).clamp(min=0).to(like.dtype))

    def preconditioner(self, mu: float | Tensor) -> Product:
        r"""Return v -> M⁻¹ v for M = (U diag(λ + μ) Uᵀ) / (λ_k + μ) + I − U Uᵀ, what CG on A + μ I should see."""
        U, scale = self.U, (self.eigenvalues[-1] + mu) / (self.eigenvalues + mu) - 1

        def precondition(v: Tensor) -> Tensor:  # (S, n)
            return v + ((v @ U.mT) * scale) @ U

        return precondition
