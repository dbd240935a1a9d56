r"""The variational bound of a sparse Gaussian process, a few points at a time.

.. math:: \sum_n E_{q(f_n)}[\log p(y_n \mid f_n)] - KL(q(v) \,\|\, N(0, I)), \qquad
   q(f_n) = N(\mu_n + W_n m,\; k_{nn} - W_n W_n^\top + W_n S W_n^\top)

v are inducing values in whitened coordinates, u = L v with L Lᵀ = K_ZZ + ε I, and W_n = K_nZ L⁻ᵀ (Hensman et al. 2015).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ntkgp.likelihoods import Expectation, Likelihood, SiteBlocks, expected, tilted
from ntkgp.posteriors.data import Data
from ntkgp.posteriors.whitened import Natural, WhitenedGaussian
from ntkgp.posteriors.whitening import Rows

__all__ = ["Averages", "Marginals", "Piece", "Statistics", "View", "collapsed_bound", "laplace", "surrogate"]


@dataclass(frozen=True)
class Piece:
    """A few training points, and what the prior says of them."""

    data: Data
    rows: Rows


@dataclass(frozen=True)
class Marginals:
    """q(f) of n points, in float64."""

    W: Tensor  # (n C, M)
    mu: Tensor  # (n, C), the prior's mean
    mean: Tensor  # (n, C)
    blocks: Tensor  # (n, C, C)


@dataclass(frozen=True)
class View:
    """The prior process under some hyperparameters, seen through its inducing values."""

    w: Tensor  # (atoms,), coefficients of the prior covariance
    L: Tensor  # (M, M)
    epsilon: Tensor  # (), the variance of the noise in u
    free: bool  # whether μ is f_lin(x; m₀) and q may move the mean, or μ is the network's output and it may not

    def detach(self) -> "View":
        """Return the same numbers without their graph."""
        return View(self.w.detach(), self.L.detach(), self.epsilon.detach(), self.free)

    def mu(self, rows: Rows) -> Tensor:  # (n, C)
        """Return the prior's mean."""
        return (rows.f + rows.moved if self.free else rows.f).double()

    def marginals(self, rows: Rows, q: WhitenedGaussian) -> Marginals:
        """Return q(f), differentiable in the hyperparameters and in q."""
        W, own = rows.whitened(self.w, self.L)
        n, C = rows.f.shape
        mu = self.mu(rows)
        by_point, V = W.view(n, C, -1), q.spread(W).view(n, C, -1)
        mean = mu + (W @ q.mean).view(n, C) if self.free else mu
        return Marginals(W, mu, mean, own - by_point @ by_point.mT + V @ V.mT)


@dataclass(frozen=True)
class Averages:
    """How the likelihood is averaged over q(f): E[log p] if α = 0, (1/α) log E[p^α] otherwise."""

    alpha: float = 0.0
    num_samples: int = 512  # draws for sites of several outputs

    def __call__(self, likelihood: Likelihood, piece: Piece, q: Marginals, seed: int) -> Expectation:
        """Return value, residual and curvature, in the network's dtype."""
        data, dtype = piece.data, piece.rows.f.dtype
        mean, blocks = q.mean.to(dtype), q.blocks.to(dtype)
        if self.alpha == 0:
            return expected(likelihood, data.y, mean, blocks, data.weights, self.num_samples, seed)
        return tilted(likelihood, data.y, mean, blocks, self.alpha, data.weights, self.num_samples, seed)


def surrogate(E: Expectation, q: Marginals) -> Tensor:  # ()
    """Return the likelihood's part of the bound with the gradient it has in mean and covariance of q(f).

    These are E[r] and −½ E[Λ]: no sample is differentiated, and by quadrature the gradient is exact, as far as Λ is the
    Hessian itself and not the Fisher information in its place.
    """
    value = E.log_prob.double() + (E.r.double() * (q.mean - q.mean.detach())).sum()
    if q.blocks.requires_grad:
        value = value - (E.curvature.dense().double() * (q.blocks - q.blocks.detach())).sum() / 2
    return value


@dataclass(frozen=True)
class Statistics:
    """What n points say of v: Σ Wᵀ Λ W and Σ Wᵀ(r + Λ(f − μ)), with Λ and r at, or averaged over, f."""

    H: Tensor  # (M, M)
    b: Tensor  # (M,)

    @classmethod
    def nothing(cls, M: int, device: torch.device) -> "Statistics":
        """Return what no points say."""
        H = torch.zeros(M, M, dtype=torch.float64, device=device)
        return cls(H, H.new_zeros(M))

    @classmethod
    def of(cls, W: Tensor, r: Tensor, curvature: SiteBlocks, distance: Tensor) -> "Statistics":  # (n C, M), (n, C)
        """Return the statistics of points with these residuals and curvatures at f − μ = ``distance``."""
        curvature = SiteBlocks(curvature.values.double())
        H = W.mT @ (curvature @ W)
        b = W.mT @ (r.double() + curvature.apply(distance)).flatten()
        return cls((H + H.mT) / 2, b)

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(self.H + other.H, self.b + other.b)

    def natural(self, scale: float, free: bool) -> Natural:
        """Return the Gaussian that prior and ``scale`` times these statistics make; centred if the mean is not free."""
        P = scale * self.H
        P.diagonal().add_(1)  # in place: P is ours
        return Natural(P, scale * self.b if free else torch.zeros_like(self.b))


def laplace(likelihood: Likelihood, piece: Piece, view: View) -> tuple[Tensor, Statistics]:  # (), ...
    """Return log p(y | f) and the statistics to second order at the network's own outputs."""
    rows, data = piece.rows, piece.data
    E = likelihood.expand(data.y, rows.f, data.weights)
    W, _ = rows.whitened(view.w, view.L)
    return E.log_prob, Statistics.of(W, E.r, E.curvature, rows.f.double() - view.mu(rows))


def collapsed_bound(likelihood: Likelihood, pieces: Iterable[Piece], view: View) -> Tensor:  # ()
    r"""Return the bound at its best q, for Gaussian noise, differentiable in all hyperparameters (Titsias 2009).

    .. math:: \sum_n \log N(y_n; \mu_n, \Lambda_n^{-1}) + \tfrac12 b^\top P^{-1} b - \tfrac12 \log |P|
       - \tfrac12 \sum_n tr\, \Lambda_n (k_{nn} - W_n W_n^\top), \qquad P = I + \sum_n W_n^\top \Lambda_n W_n

    with b = Σ Wᵀ Λ (y − μ), or 0 where the mean is not free. Without the last sum it is log N(y; μ, W Wᵀ + Λ⁻¹).
    """
    total, sums = torch.zeros(()).to(view.L), None
    for piece in pieces:
        rows, data = piece.rows, piece.data
        W, own = rows.whitened(view.w, view.L)
        by_point = W.view(*rows.f.shape, -1)
        E = likelihood.expand(data.y, view.mu(rows).to(rows.f.dtype), data.weights)
        left = own - by_point @ by_point.mT
        total = total + E.log_prob - (E.curvature.dense().double() * left).sum() / 2
        found = Statistics.of(W, E.r, E.curvature, torch.zeros_like(view.mu(rows)))
        sums = found if sums is None else sums + found
    if sums is None:
        raise ValueError("there are no data to bound the evidence of")
    best = sums.natural(1.0, view.free)
    return total + (best.h @ best.mean - best.log_det()) / 2
