r"""Gaussians over inducing values in whitened coordinates, where the prior is N(0, I)."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.linalg import solve_triangular

__all__ = ["Factored", "Natural", "WhitenedGaussian"]


class WhitenedGaussian(Protocol):
    """q(v) = N(m, S), beside the prior p(v) = N(0, I)."""

    @property
    def mean(self) -> Tensor:  # (M,)
        """Return m."""

    def spread(self, W: Tensor) -> Tensor:  # (r, M) -> (r, M)
        """Return V with V Vᵀ = W S Wᵀ."""

    def kl(self) -> Tensor:  # ()
        """Return KL(q ‖ p) = ½ (tr S + mᵀm − M − log |S|)."""


@dataclass(frozen=True)
class Natural:
    """N(m, S) by its natural parameters P = S⁻¹ and h = P m, both linear in what data say of v."""

    P: Tensor  # (M, M)
    h: Tensor  # (M,)

    @classmethod
    def prior(cls, M: int, device: torch.device) -> "Natural":
        """Return N(0, I)."""
        return cls(torch.eye(M, dtype=torch.float64, device=device), torch.zeros(M, dtype=torch.float64, device=device))

    @cached_property
    def root(self) -> Tensor:  # (M, M)
        """Cholesky factor of P, whose eigenvalues are at least one where Λ is positive semidefinite."""
        return torch.linalg.cholesky(self.P)

    @cached_property
    def mean(self) -> Tensor:  # (M,)
        """P⁻¹ h."""
        return torch.cholesky_solve(self.h.unsqueeze(-1), self.root).squeeze(-1)

    @cached_property
    def covariance(self) -> Tensor:  # (M, M)
        """S."""
        return torch.cholesky_inverse(self.root)

    @cached_property
    def inverse_root(self) -> Tensor:  # (M, M)
        """A with A Aᵀ = S, upper triangular."""
        return solve_triangular(self.root.mT, torch.eye(len(self.h)).to(self.h), upper=True)

    def spread(self, W: Tensor) -> Tensor:  # (r, M) -> (r, M)
        """Return V with V Vᵀ = W S Wᵀ."""
        return solve_triangular(self.root, W.mT, upper=False).mT

    def log_det(self) -> Tensor:  # ()
        """Return log |P|."""
        return 2 * self.root.diagonal().log().sum()

    def kl(self) -> Tensor:  # ()
        """Return the divergence from the prior."""
        trace = self.covariance.diagonal().sum()
        return (trace + self.mean.square().sum() - len(self.h) + self.log_det()) / 2

    def toward(self, other: "Natural", rate: float) -> "Natural":
        """Return (1 − ρ) times this and ρ times the other, in natural parameters: a natural-gradient step."""
        return Natural(torch.lerp(self.P, other.P, rate), torch.lerp(self.h, other.h, rate))

    def to(self, device: torch.device) -> "Natural":
        """Return the same on another device; always float64."""
        return Natural(self.P.to(device), self.h.to(device))


@dataclass(frozen=True)
class Factored:
    r"""m = m₀ + A t and S = A T Tᵀ Aᵀ, from a Gaussian N(m₀, A Aᵀ) nearby, in whose units t and T are.

    There the divergence has curvature of about one in every direction, which is what plain gradient steps need.
    T is lower triangular, and the diagonal of ``raw`` holds the logarithms of its own.
    """

    m0: Tensor  # (M,)
    A: Tensor  # (M, M)
    t: Tensor  # (M,)
    raw: Tensor  # (M, M)

    @classmethod
    def near(cls, q: Natural) -> "Factored":
        """Return q itself, t = 0 and T = I."""
        return cls(q.mean, q.inverse_root, torch.zeros_like(q.h), torch.zeros_like(q.P))

    def at(self, t: Tensor, raw: Tensor) -> "Factored":
        """Return the Gaussian with other coordinates."""
        return replace(self, t=t, raw=raw)

    @property
    def mean(self) -> Tensor:  # (M,)
        """The mean, m."""
        return self.m0 + self.A @ self.t

    @property
    def _root(self) -> Tensor:  # A T, (M, M)
        return self.A @ (self.raw.tril(-1) + self.raw.diagonal().exp().diag())

    def spread(self, W: Tensor) -> Tensor:  # (r, M) -> (r, M)
        """Return V with V Vᵀ = W S Wᵀ."""
        return W @ self._root

    def kl(self) -> Tensor:  # ()
        """Return the divergence from the prior."""
        log_det = 2 * (self.A.diagonal().abs().log() + self.raw.diagonal()).sum()
        return (self._root.square().sum() + self.mean.square().sum() - len(self.t) - log_det) / 2

    def natural(self) -> Natural:
        """Return the same Gaussian by its natural parameters."""
        inverse = torch.linalg.inv(self._root)
        P = inverse.mT @ inverse
        return Natural(P, P @ self.mean)
