"""The posterior given one measurement of an image: one Gram matrix over pixels, and all else is linear algebra."""

import math
from collections.abc import Callable, Hashable
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from ntkgp.inverse.operators import Measurement
from ntkgp.linearization import Features, Linearization
from ntkgp.linearization.features import DenseBlock
from ntkgp.linearization.inputs import Input
from ntkgp.operators import gram
from ntkgp.posteriors import FunctionSpacePosterior
from ntkgp.posteriors.capacitance import capacitance
from ntkgp.priors import LinearPrior, Prior

__all__ = ["ObservationSpacePosterior", "PixelGram"]

_ROWS = 64  # pixels that are differentiated together


class PixelGram:
    r"""K = J S₀ Jᵀ over the pixels of one image, as a function of the prior.

    Of a linear prior, S₀ = Σ_j w_j S_j, the K_j = J S_j Jᵀ are computed once, d_x² numbers each, and J is forgotten. A
    convolution has one for every distance between weights of its filters.

    Args:
        lin: of the network that returns pixels.
        z: its input.
    """

    def __init__(self, lin: Linearization, z: Tensor) -> None:
        self.lin, self.z = lin, z
        self._atoms: dict[Hashable, Tensor] = {}
        self._features: Features | None = None

    def __call__(self, prior: Prior) -> Tensor:  # (d_x, d_x)
        """Return K, differentiable in the prior."""
        if isinstance(prior, LinearPrior):
            return torch.tensordot(prior.coefficients(), self.atoms(prior), 1)
        if self._features is None:
            self._features = self._jacobian()
        return gram(self._features, None, prior.covariances())

    def atoms(self, prior: LinearPrior) -> Tensor:  # (number of atoms, d_x, d_x)
        """Return the K_j."""
        key = type(prior), prior.atoms_key
        if key not in self._atoms:
            with torch.no_grad():
                F = self._jacobian()
                self._atoms[key] = torch.stack([gram(F, None, atom) for atom in prior.atoms])
        return self._atoms[key]

    def _jacobian(self) -> Features:
        """Return J from a few pixels at a time: cotangents of all at once would take several times J itself."""
        eye = torch.eye(self.lin.num_outputs, dtype=self.lin.dtype, device=self.lin.device)
        J = torch.cat([self.lin.vjp(self.z, rows.unsqueeze(1)) for rows in eye.split(_ROWS)]).unsqueeze(0)
        parts = zip(self.lin.layout.names, J.split(self.lin.layout.sizes, dim=-1), strict=True)
        return Features(1, len(eye), (), tuple(DenseBlock(part, {name: slice(None)}) for name, part in parts))

    def converted(self, fn: Callable[[Tensor], Tensor]) -> "PixelGram":
        """Return the same in another dtype or on another device."""
        return PixelGram(self.lin.converted(lambda module: module._apply(fn)), fn(self.z))


class ObservationSpacePosterior(FunctionSpacePosterior):
    r"""The function space of a network that returns A f, with its kernel A K Aᵀ from that of the pixels.

    Then Σ_yy = A K Aᵀ + σ² I is factorised, and the image has the covariance K − K Aᵀ Σ_yy⁻¹ A K. Noise is Gaussian, so
    the evidence needs the weights nowhere, and its steps no derivative of the network.

    Args:
        state: as of every posterior; the model is that of the measurement, one point with d_y outputs.
        K: over pixels.
        A: the operator.
    """

    A: Measurement

    def __init__(self, *state: Any, K: PixelGram, A: Measurement) -> None:
        super().__init__(*state)
        self.K = K
        self.__dict__["A"] = A  # no submodule: its entries are no hyperparameters
        self._expected: tuple[Tensor, Tensor] | None = None

    @property
    def _options(self) -> dict[str, Any]:
        return {"K": self.K, "A": self.A}

    def update(self, x: Input, y: Tensor, weights: Tensor | None = None) -> Self:
        """Refuse: there is one point, all of the measurement.

        Raises:
            ValueError: always.
        """
        raise ValueError("a reconstruction cannot be updated: reconstruct again from both measurements together")

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Refuse: operators are not written.

        Raises:
            ValueError: always.
        """
        raise ValueError("a reconstruction cannot be saved: keep its network, and linearise it again")

    def image_covariance(self) -> Tensor:  # (d_x, d_x)
        """Return the posterior covariance of the pixels."""

        def make() -> Tensor:
            with torch.no_grad():
                K, (L, R) = self.K(self.prior), self._factor()
                V = solve_triangular(L, R.mT @ self._measured(K).mT, upper=False)
                return K - V.mT @ V

        return self._current("image covariance", make)

    def _log_joint_at_mode(self, **search: Any) -> Tensor:  # ()
        r"""Return max_θ log p(y | f_lin(θ)) − ½ ‖θ − m₀‖²_{S₀⁻¹} = −½ rᵀ Σ_yy⁻¹ r − ½ log |2π σ² I|, without weights.

        Here r = y − A μ₀, and with α = Σ_yy⁻¹ r held fixed, ½ αᵀ Σ_yy α − rᵀ α has this value and its gradient.
        """
        r, noise = self._surprise(), self.likelihood.noise.expand(self.lin.num_outputs)
        with torch.no_grad():
            L, R = self._factor()
            alpha = (R @ torch.cholesky_solve(R.mT @ r.unsqueeze(1), L)).squeeze(1)
        quadratic = (alpha @ (self._gram() @ alpha) + noise @ alpha**2) / 2 - r @ alpha
        return quadratic - (2 * math.pi * noise).log().sum() / 2

    def _gain_at_mode(self) -> float:
        """Return how much better, in nats, the linear model explains y than the network: it leaves σ² α of y."""
        with torch.no_grad():
            left = self.model.data.y[0] - self.model.f()[0]
            L, R = self._factor()
            alpha = (R @ torch.cholesky_solve(R.mT @ self._surprise().unsqueeze(1), L)).squeeze(1)
            noise = self.likelihood.noise.expand_as(left)
            return ((left**2 / noise).sum() - (noise * alpha**2).sum()).item() / 2

    def _surprise(self) -> Tensor:  # y − A μ₀, (d_y,)
        """Return what the prior mean leaves of the measurement; computed once."""
        m0 = self.prior.mean
        if self._expected is None or not torch.equal(self._expected[0], m0):
            with torch.no_grad():
                left = self.model.data.y - self.model.f() - self.model.push((m0 - self.lin.theta).unsqueeze(0))[0]
            self._expected = m0.clone(), left[0]
        return self._expected[1]

    def _gram(self) -> Tensor:  # A K Aᵀ, (d_y, d_y)
        """Return the kernel of the measurement, differentiable in the prior; of a linear one from A K_j Aᵀ."""
        if not isinstance(self.prior, LinearPrior):
            return self._sandwich(self.K(self.prior))
        if self._atoms is None:
            with torch.no_grad():
                self._atoms = torch.stack([self._sandwich(K_j) for K_j in self.K.atoms(self.prior)])
        return torch.tensordot(self.prior.coefficients(), self._atoms, 1)

    def _sandwich(self, K: Tensor) -> Tensor:  # A K Aᵀ, (d_x, d_x) -> (d_y, d_y)
        return self._measured(self._measured(K).mT)

    def _measured(self, rows: Tensor) -> Tensor:  # (n, d_x) -> (n, d_y)
        return self.A(rows.view(-1, *self.A.image_shape)).flatten(1)

    def _assembled(self) -> Tensor:  # B
        with torch.no_grad():
            return capacitance(self._gram(), self._site_roots())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.K, self.__dict__["A"] = self.K.converted(fn), deepcopy(self.A)._apply(fn)
        self._expected = None
        return super()._apply(fn, recurse)
