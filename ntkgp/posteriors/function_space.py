"""The Gaussian-process view: everything through K and B = I + Rᵀ K R, at the training points."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from ntkgp.likelihoods import SiteBlocks
from ntkgp.linearization import Features
from ntkgp.linearization.inputs import Input
from ntkgp.linearization.memory import empty
from ntkgp.operators import gram, point_blocks
from ntkgp.posteriors.base import Posterior
from ntkgp.posteriors.capacitance import capacitance, log_det, pairwise_gram
from ntkgp.posteriors.data import checked, joined
from ntkgp.posteriors.mode import Mode, function_space_mode
from ntkgp.posteriors.prediction import Latent, valid_covariance
from ntkgp.priors import Covariance, LinearPrior
from ntkgp.solvers import Ranks

__all__ = ["FunctionSpacePosterior"]


class FunctionSpacePosterior(Posterior):
    r"""q(f(x)) with covariance K_** − K_*N R B⁻¹ Rᵀ K_N*, full kernel and full blocks Λ = R Rᵀ.

    Fitting costs one Gram matrix and one Cholesky factorisation; a prediction one pass over x, one product with the
    training features, and one triangular solve. Under ``torchrun`` processes share the tiles of the Gram matrix.
    """

    method = "function"

    _atoms: Tensor | None = None  # K_j of a linear prior, which no hyperparameter changes

    def _prepare(self) -> None:
        self._factor()

    def _blocks(self, F: Features) -> Tensor:  # (n, C, C)
        return _difference(point_blocks(F, None, self.prior.covariances()), self._whitened_cross(F))

    def _memory(self, points: int) -> Callable[[Input], Callable[[], Latent]] | None:
        prior, N, C = self.prior, len(self.model.data), self.lin.num_outputs
        if isinstance(prior, LinearPrior):
            budget, atom = self.model.memory_budget, C * C * self.lin.dtype.itemsize * len(prior.atoms)
            if points * (N + 1) * atom <= budget:
                if N * N * (atom + C * C * self.lin.dtype.itemsize) <= budget:  # beside B
                    self._keep_atoms(prior)
                return partial(self._remembered_kernel, prior)
        return super()._memory(points)

    def _remembered_kernel(self, prior: LinearPrior, x: Input) -> Callable[[], Latent]:
        """Keep K_j of these points, with themselves and with the training points, for other coefficients w."""
        F, atoms = self.lin.features(x), prior.atoms
        mean = self._mean(self.lin(x), F)
        own = torch.stack([point_blocks(F, None, atom) for atom in atoms])
        parts = [torch.stack([gram(chunk.F, F, atom) for atom in atoms]) for chunk in self.model]
        across = torch.cat(parts, dim=1)  # (atoms, N C, n C)

        def latent() -> Latent:
            w, (L, R) = prior.coefficients(), self._factor()
            V = solve_triangular(L, R.mT @ torch.tensordot(w, across, 1), upper=False)
            return Latent(mean, valid_covariance(_difference(torch.tensordot(w, own, 1), V)))

        return latent

    def _joint(self, F: Features) -> Tensor:  # (n C, n C)
        V = self._whitened_cross(F).double()
        return (gram(F, None, self.prior.covariances()).double() - V.mT @ V).to(F.like.dtype)

    def _whitened_cross(self, F: Features) -> Tensor:  # L⁻¹ Rᵀ K_N*, (N C', n C)
        S0, (L, _) = self.prior.covariances(), self._factor()
        parts = [gram(weighted, F, S0) for weighted in self._weighted()]
        return solve_triangular(L, parts[0] if len(parts) == 1 else torch.cat(parts), upper=False)

    def _weighted(self) -> Iterator[Features]:
        """Yield the features of Rᵀ J, chunk by chunk; kept as those of J are."""
        if self.model.kept:
            yield from self._current("weighted", lambda: list(self._weigh()))
        else:
            yield from self._weigh()

    def _weigh(self) -> Iterator[Features]:
        R = self._site_roots()
        for chunk in self.model:
            yield chunk.F.weighted(R[chunk.points].mT.columns)

    @property
    def _bytes_per_point(self) -> int:
        C = self.lin.num_outputs
        return 4 * len(self.model.data) * C * C * self.lin.dtype.itemsize

    def _forget(self) -> None:
        super()._forget()
        self._atoms = None

    # K, R and B

    def _root(self) -> SiteBlocks:  # (N, T, k, k')
        return SiteBlocks(torch.cat([self._site_root(chunk).values for chunk in self.model]))

    def _site_roots(self) -> SiteBlocks:
        """R under the current hyperparameters, without gradients."""

        def make() -> SiteBlocks:
            with torch.no_grad():
                return self._root().detach()

        return self._current("root", make)

    def _gram(self) -> Tensor:  # (N C, N C)
        """Return K, differentiable in the prior; of a linear prior from K_j that are kept once gradients are asked."""
        learning = torch.is_grad_enabled() and any(p.requires_grad for p in self.prior.parameters())
        if isinstance(self.prior, LinearPrior) and (learning or self._atoms is not None):
            return torch.tensordot(self.prior.coefficients(), self._keep_atoms(self.prior), 1)
        return self._gram_under(self.prior.covariances())

    def _keep_atoms(self, prior: LinearPrior) -> Tensor:  # (atoms, N C, N C)
        if self._atoms is None:
            with torch.no_grad():
                self._atoms = torch.stack([self._gram_under(atom) for atom in prior.atoms])
        return self._atoms

    def _gram_under(self, S: dict[str, Covariance]) -> Tensor:  # J S Jᵀ, (N C, N C)
        return pairwise_gram(lambda: (chunk.F for chunk in self.model), S, Ranks.here())

    def _factor(self) -> tuple[Tensor, SiteBlocks]:
        """Return the Cholesky factor of B, and R."""
        return self._current("factor", lambda: self._factorise(self._assembled()))

    def _assembled(self) -> Tensor:  # B
        with torch.no_grad():
            if self._atoms is not None:
                return capacitance(self._gram(), self._site_roots())
            B = pairwise_gram(self._weighted, self.prior.covariances(), Ranks.here())
            B.diagonal().add_(1)
            return B

    def _factorise(self, B: Tensor) -> tuple[Tensor, SiteBlocks]:
        """Factorise B, which is overwritten."""
        with torch.no_grad():
            # Column-major and in place: a symmetric matrix is its own transpose.
            L, info = torch.linalg.cholesky_ex(B.mT, out=(B.mT, torch.empty((), dtype=torch.int32, device=B.device)))
            if info.item():
                raise torch.linalg.LinAlgError(
                    f"B = I + RᵀKR lost positive definiteness in {B.dtype} (row {info.item()} of {len(B)}): "
                    "use lin.double(), or a larger prior precision"
                )
            return L, self._site_roots()

    def _log_det(self) -> Tensor:  # ()
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            B = capacitance(self._gram(), self._root())
            # Factorised where it lies: only its gradient is needed of B from here on.
            return log_det(B, self._current("factor", lambda: self._factorise(B.detach()))[0])
        return 2 * self._factor()[0].diagonal().log().sum()

    # The mode and samples

    def _find_mode(self, start: Tensor) -> Mode:
        data, f = self.model.data, self.model.f()
        before = self.prior.mean - self.lin.theta
        to_start, to_prior = self.model.push(torch.stack([start, before]))
        alpha, certificate = function_space_mode(
            self._gram(), f + to_start, f + to_prior, lambda at: self.likelihood.expand(data.y, at, data.weights)
        )
        return Mode(before + self._pulled(alpha.unsqueeze(0))[0], certificate)

    def _pulled(self, u: Tensor) -> Tensor:  # S₀ Jᵀ u, (S, N, C) -> (S, P)
        return self.prior.covariance_times(self.model.pull(u))

    def _covariance_times(self, v: Tensor) -> Tensor:  # S₀ v − S₀ Jᵀ R B⁻¹ Rᵀ J S₀ v, (S, P)
        L, R = self._factor()
        Sv = self.prior.covariance_times(v)
        u = R.mT @ self.model.push(Sv).flatten(1).mT
        u = R @ solve_triangular(L.mT, solve_triangular(L, u, upper=False), upper=True)
        return Sv - self._pulled(u.mT.unflatten(1, (-1, self.lin.num_outputs)))

    def _centred_weights(self, n: int, generator: torch.Generator | None) -> Tensor:  # (n, P)
        r"""Draw by Matheron's rule: θ₀ + S₀ Jᵀ R B⁻¹(ε − Rᵀ J θ₀), θ₀ ~ N(0, S₀), ε ~ N(0, I)."""
        like = self.lin.theta
        z = torch.randn(n, len(like), generator=generator, dtype=like.dtype, device=like.device)
        noise = torch.randn(n, len(self._factor()[0]), generator=generator, dtype=like.dtype, device=like.device)
        return self._from_noise(z, noise)

    def _from_noise(self, z: Tensor, noise: Tensor) -> Tensor:  # (n, P), (n, N C') -> (n, P)
        L, R = self._factor()
        theta = self.prior.spread(z)
        gap = noise.mT - R.mT @ self.model.push(theta).flatten(1).mT  # (N C, n)
        u = R @ solve_triangular(L.mT, solve_triangular(L, gap, upper=False), upper=True)
        return theta + self._pulled(u.mT.unflatten(1, (-1, self.lin.num_outputs)))

    # More data

    def update(self, x: Input, y: Tensor, weights: Tensor | None = None) -> Self:
        """Return the posterior with more data: the factor of B grows by a block, nothing is refitted.

        Args:
            x: new points.
            y: their targets.
            weights: how many points each stands for.

        Raises:
            ValueError: if this posterior is refined: its mean would have to move, so update first and refine then.
        """
        if self.shift is not None or self.sites is not None:
            raise ValueError("a refined posterior cannot be updated: update the one that fit returned, then refine it")
        old, new = self.model.data, checked(x, y, self.lin, self.likelihood, weights)
        both = type(self)(self.model.with_source(joined(old, new)), self.prior, self.likelihood)
        with torch.no_grad():
            L, R = self._factor()
            R2 = self.likelihood.expand(new.y, self.lin(new.x), new.weights).R
            F = self.lin.features(new.x).weighted(R2.mT.columns)
            across = self._whitened_cross(F)  # L⁻¹ Rᵀ K R₂
            B = gram(F, None, self.prior.covariances()) - across.mT @ across
            B.diagonal().add_(1)
            size = len(L) + len(B)
            grown = empty((size, size), L).zero_()
            grown[: len(L), : len(L)] = L.tril()
            grown[len(L) :, : len(L)] = across.mT
            grown[len(L) :, len(L) :] = torch.linalg.cholesky(B)
            both._current("factor", lambda: (grown, SiteBlocks(torch.cat([R.values, R2.values]))))
        return both


def _difference(own: Tensor, V: Tensor) -> Tensor:  # (n, C, C), (N C', n C) -> (n, C, C)
    """Return k(x, x) − VᵀV of each point: it may be small beside its terms, so it is formed in double precision."""
    V = V.unflatten(1, own.shape[:2]).movedim(0, -1).double()  # (n, C, N C')
    return (own.double() - V @ V.mT).to(own.dtype)
