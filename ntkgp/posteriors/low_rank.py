"""Jᵀ Λ J ≈ W Wᵀ with k columns: a function-space posterior whose outputs are k directions."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.linalg import solve_triangular

from ntkgp.linearization import Features
from ntkgp.operators import gram, point_blocks
from ntkgp.posteriors.capacitance import log_det
from ntkgp.posteriors.model import split
from ntkgp.posteriors.weight_space import WeightSpacePosterior

__all__ = ["LowRankPosterior"]


class LowRankPosterior(WeightSpacePosterior):
    r"""Σ = S₀ − S₀ W (I + Wᵀ S₀ W)⁻¹ Wᵀ S₀, with W Wᵀ the leading eigenpairs of Jᵀ Λ J.

    Works with any prior: W does not depend on it. Directions that are left out keep their prior variance.

    Args:
        state: as for :class:`Posterior`.
        rank: k.
    """

    method = "low_rank"

    def __init__(self, *state: Any, rank: int = 100) -> None:
        super().__init__(*state)
        if not 1 <= rank < self.lin.num_params:
            raise ValueError(f"rank must be from 1 to {self.lin.num_params - 1}, but is {rank}")
        self.rank = rank

    @property
    def _options(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def _collect(self) -> Tensor:  # one W for each atom, (atoms, k, P)
        count = len(self._coefficients())
        return torch.stack([self._leading(atom) for atom in range(count)])

    def _leading(self, atom: int) -> Tensor:  # (k, P)
        """Find the leading eigenpairs by Lanczos iterations, one pass over the training data each."""
        from scipy.sparse.linalg import LinearOperator, eigsh  # slow to import

        theta, P = self.lin.theta, self.lin.num_params

        def ggn(x: np.ndarray) -> np.ndarray:
            v = torch.as_tensor(x).to(theta).reshape(1, -1)
            out = torch.zeros_like(theta)
            for chunk in self.model:
                R = self._roots(chunk)[atom]
                out += chunk.pull(R.apply(R.mT.apply(chunk.push(v))))[0]
            return out.double().cpu().numpy()

        operator = LinearOperator((P, P), matvec=ggn, dtype="float64")
        start = torch.randn(P, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
        values, vectors = eigsh(operator, k=min(self.rank, P - 1), which="LA", v0=start)
        values, vectors = torch.as_tensor(values).clamp(min=0), torch.as_tensor(vectors)
        return (vectors * values.sqrt()).mT.to(theta)

    def _W(self) -> Tensor:  # (atoms k, P)
        return (self._coefficients().sqrt()[:, None, None] * self._statistics()).flatten(0, 1)

    def _capacitance(self) -> Tensor:  # I + Wᵀ S₀ W
        W = self._W()
        B = W @ self.prior.covariance_times(W).mT
        return B + B.new_ones(()).expand(len(B)).diag_embed()

    def _factor(self) -> Tensor:
        def factorise() -> Tensor:
            with torch.no_grad():
                return torch.linalg.cholesky(self._capacitance())

        return self._current("factor", factorise)

    def _log_det(self) -> Tensor:  # ()
        learning = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        return log_det(self._capacitance(), self._factor()) if learning else 2 * self._factor().diagonal().log().sum()

    def _whitened_cross(self, F: Features) -> Tensor:  # (k, n, C)
        SW = self.prior.covariance_times(self._W())
        cross = F.jvp(split(self.lin, SW))
        return solve_triangular(self._factor(), cross.flatten(1), upper=False).view(cross.shape)

    def _blocks(self, F: Features) -> Tensor:  # (n, C, C)
        V = self._whitened_cross(F).movedim(0, -1).double()  # (n, C, k)
        return (point_blocks(F, None, self.prior.covariances()).double() - V @ V.mT).to(F.like.dtype)

    def _joint(self, F: Features) -> Tensor:  # (n C, n C)
        V = self._whitened_cross(F).flatten(1).double()
        return (gram(F, None, self.prior.covariances()).double() - V.mT @ V).to(F.like.dtype)

    def _covariance_times(self, v: Tensor) -> Tensor:  # (S, P)
        L, W = self._factor(), self._W()
        Sv = self.prior.covariance_times(v)
        u = solve_triangular(L.mT, solve_triangular(L, W @ Sv.mT, upper=False), upper=True)
        return Sv - self.prior.covariance_times(u.mT @ W)

    def _centred_weights(self, n: int, generator: torch.Generator | None) -> Tensor:  # (n, P)
        L, W = self._factor(), self._W()
        z = torch.randn(n, self.lin.num_params, generator=generator, dtype=W.dtype, device=W.device)
        noise = torch.randn(len(W), n, generator=generator, dtype=W.dtype, device=W.device)
        theta = self.prior.spread(z)
        gap = noise - W @ theta.mT
        u = solve_triangular(L.mT, solve_triangular(L, gap, upper=False), upper=True)
        return theta + self.prior.covariance_times(u.mT @ W)
