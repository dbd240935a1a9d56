"""Filters as small Gaussian processes: neighbouring weights of a convolution kernel resemble each other."""

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from ntkgp.linearization import Linearization
from ntkgp.priors.base import LinearPrior, positive
from ntkgp.priors.covariance import Covariance, Separable, Uniform

__all__ = ["ConvFilterGP"]


class ConvFilterGP(LinearPrior):
    r"""Every filter of a convolution is a draw from a GP over its grid, k(p, p') = σ² exp(−‖p − p'‖ / ℓ).

    Filters are independent and share σ² and ℓ within a parameter tensor; filters with one weight, and all other
    parameters, are independent with variance σ². Because the grid is fixed, S₀ = Σ σ² exp(−δ/ℓ) E_δ over the few
    distances δ of the grid, with E_δ marking the pairs at that distance.

    Args:
        lin: whose parameters the prior is over.
        variance: σ², a number, a dict by parameter name, or a tensor with one for each parameter tensor.
        lengthscale: ℓ, a number, a dict by parameter name, or a tensor with one for each convolution, in weights.
        mean: m₀.

    Raises:
        ValueError: if the network has no convolution with filters, or a hyperparameter is not positive.
    """

    def __init__(
        self,
        lin: Linearization,
        variance: float | Mapping[str, float] | Tensor = 1.0,
        lengthscale: float | Mapping[str, float] | Tensor = 1.0,
        mean: float | Tensor | str = 0.0,
    ) -> None:
        super().__init__(lin, mean)
        self.filters = {
            name: shape[2:]
            for name, shape in zip(self.layout.names, self.layout.shapes, strict=True)
            if name in lin.convolutions and shape[2:].numel() > 1
        }
        if not self.filters:
            raise ValueError("lin must have convolutions with filters of more than one weight, but has none")
        self._positive("variance", _each("variance", variance, self.layout.names).to(self.mean))
        self._positive("lengthscale", _each("lengthscale", lengthscale, tuple(self.filters)).to(self.mean))
        self._distances = {name: _grid_distances(kernel) for name, kernel in self.filters.items()}

    @property
    def variance(self) -> Tensor:  # (number of parameter tensors,)
        """σ², the variance of each parameter tensor."""
        return self._get_positive("variance")

    @variance.setter
    def variance(self, value: float | Mapping[str, float] | Tensor) -> None:
        self._set_positive("variance", _each("variance", value, self.layout.names))

    @property
    def lengthscale(self) -> Tensor:  # (number of convolutions,)
        """ℓ, the lengthscale of each convolution's filters."""
        return self._get_positive("lengthscale")

    @lengthscale.setter
    def lengthscale(self, value: float | Mapping[str, float] | Tensor) -> None:
        self._set_positive("lengthscale", _each("lengthscale", value, tuple(self.filters)))

    def grid_distances(self, name: str) -> Tensor:  # (k, k)
        """Return ‖p − p'‖ between the weights of a convolution's filters."""
        return self._distances[name]

    @property
    def atoms(self) -> list[dict[str, Covariance]]:
        """E_δ for every convolution and distance, the identity for every other parameter."""
        d_0 = {name: shape[0] for name, shape in zip(self.layout.names, self.layout.shapes, strict=True) if shape}
        atoms: list[dict[str, Covariance]] = []
        for name in self.layout.names:
            if name not in self.filters:
                atoms.append({name: Uniform(torch.ones_like(self.mean[0]))})
                continue
            distances = self._distances[name]
            for delta in distances.unique():
                E = (distances == delta).to(self.mean)
                atoms.append({name: Separable(None, E, d_0[name])})
        return atoms

    @property
    def atoms_key(self) -> Hashable:
        """What the atoms are, for caches."""
        return tuple(self.filters.items())

    def coefficients(self) -> Tensor:  # (number of atoms,)
        """Return σ² exp(−δ/ℓ) in the order of the atoms."""
        lengthscales = dict(zip(self.filters, self.lengthscale.unbind(), strict=True))
        parts = []
        for name, variance in zip(self.layout.names, self.variance.unbind(), strict=True):
            if name in self.filters:
                delta = self._distances[name].unique().to(self.mean)
                parts.append(variance * torch.exp(-delta / lengthscales[name]))
            else:
                parts.append(variance.reshape(1))
        return torch.cat(parts)

    def covariances(self) -> dict[str, Covariance]:
        """Return the filter covariance of every convolution, a variance for every other parameter."""
        lengthscales = dict(zip(self.filters, self.lengthscale.unbind(), strict=True))
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        result: dict[str, Covariance] = {}
        for name, variance in zip(self.layout.names, self.variance.unbind(), strict=True):
            if name in self.filters:
                V = variance * torch.exp(-self._distances[name].to(self.mean) / lengthscales[name])
                result[name] = Separable(None, V, shapes[name][0])
            else:
                result[name] = Uniform(variance)
        return result


def _grid_distances(kernel: torch.Size) -> Tensor:  # (k, k), on the CPU in float64: distances are compared exactly
    points = torch.cartesian_prod(*(torch.arange(size) for size in kernel)).reshape(kernel.numel(), -1)
    squared = (points.unsqueeze(0) - points.unsqueeze(1)).square().sum(-1)
    return squared.double().sqrt()


def _each(argument: str, value: float | Mapping[str, float] | Tensor, names: tuple[str, ...]) -> Tensor:
    if isinstance(value, Mapping):
        if set(value) != set(names):
            raise ValueError(f"{argument} must name {list(names)}, but names {list(value)}")
        value = torch.stack([torch.as_tensor(value[name]) for name in names])
    value = positive(argument, value)
    if value.ndim > 1 or value.numel() not in (1, len(names)):
        raise ValueError(f"{argument} must be a number or {len(names)} numbers, but has shape {tuple(value.shape)}")
    return value.expand(len(names)).clone()
