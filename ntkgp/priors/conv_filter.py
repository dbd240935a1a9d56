"""Filters as small Gaussian processes: neighbouring weights of a convolution kernel resemble each other."""

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from ntkgp.linearization import Linearization
from ntkgp.priors.base import LinearPrior, positive
from ntkgp.priors.covariance import Covariance, Separable, Uniform

__all__ = ["ConvFilterGP"]

_LONGEST = 1e3  # weights: the evidence may ask for constant filters, and these are constant to a thousandth


class ConvFilterGP(LinearPrior):
    r"""Every filter of a convolution is a draw from a GP over its grid, k(p, p') = σ² exp(−‖p − p'‖ / ℓ).

    Filters are independent and share σ² and ℓ within a block, by default one parameter tensor; filters with one weight,
    and all other parameters, are independent with variance σ². Because the grid is fixed, S₀ = Σ σ² exp(−δ/ℓ) E_δ over
    the few distances δ of the grid, with E_δ marking the pairs at that distance.

    Args:
        lin: whose parameters the prior is over.
        variance: σ², a number, a dict by block, or a tensor with one for each block.
        lengthscale: ℓ, a number, a dict by block, or a tensor with one for each block of filters, in weights.
        mean: m₀.
        blocks: which parameters share σ² and ℓ, {name of a block: names of parameters}; filters of a block are of one
            size. What is not named is a block of its own.

    Raises:
        ValueError: if the network has no convolution with filters, a hyperparameter is not positive, or parameters
            cannot be a block.
    """

    def __init__(
        self,
        lin: Linearization,
        variance: float | Mapping[str, float] | Tensor = 1.0,
        lengthscale: float | Mapping[str, float] | Tensor = 1.0,
        mean: float | Tensor | str = 0.0,
        blocks: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        super().__init__(lin, mean)
        kernels = {
            name: shape[2:]
            for name, shape in zip(self.layout.names, self.layout.shapes, strict=True)
            if name in lin.convolutions and shape[2:].numel() > 1
        }
        if not kernels:
            raise ValueError("lin must have convolutions with filters of more than one weight, but has none")
        self.blocks = _partition(self.layout.names, kernels, blocks or {})
        self.filters = {block: kernels[names[0]] for block, names in self.blocks.items() if names[0] in kernels}
        self._positive("variance", _each("variance", variance, tuple(self.blocks)).to(self.mean))
        self._positive("lengthscale", _each("lengthscale", lengthscale, tuple(self.filters)).to(self.mean))
        self._distances = {name: _grid_distances(kernel) for name, kernel in self.filters.items()}

    @property
    def variance(self) -> Tensor:  # (number of blocks,)
        """σ², the variance of each block."""
        return self._get_positive("variance")

    @variance.setter
    def variance(self, value: float | Mapping[str, float] | Tensor) -> None:
        self._set_positive("variance", _each("variance", value, tuple(self.blocks)))

    @property
    def lengthscale(self) -> Tensor:  # (number of blocks of filters,)
        """ℓ, the lengthscale of each block of filters, at most 1000 weights: longer ones would make S₀ singular."""
        return self._get_positive("lengthscale").clamp(max=_LONGEST)

    @lengthscale.setter
    def lengthscale(self, value: float | Mapping[str, float] | Tensor) -> None:
        self._set_positive("lengthscale", _each("lengthscale", value, tuple(self.filters)))

    def grid_distances(self, block: str) -> Tensor:  # (k, k)
        """Return ‖p − p'‖ between the weights of a block's filters."""
        return self._distances[block]

    @property
    def atoms(self) -> list[dict[str, Covariance]]:
        """E_δ for every block of filters and distance, the identity for every other block."""
        d_0 = {name: shape[0] for name, shape in zip(self.layout.names, self.layout.shapes, strict=True) if shape}
        atoms: list[dict[str, Covariance]] = []
        for block, names in self.blocks.items():
            if block not in self.filters:
                atoms.append({name: Uniform(torch.ones_like(self.mean[0])) for name in names})
                continue
            distances = self._distances[block]
            for delta in distances.unique():
                E = (distances == delta).to(self.mean)
                atoms.append({name: Separable(None, E, d_0[name]) for name in names})
        return atoms

    @property
    def atoms_key(self) -> Hashable:
        """What the atoms are, for caches."""
        return tuple(self.blocks.items()), tuple(self.filters.items())

    def coefficients(self) -> Tensor:  # (number of atoms,)
        """Return σ² exp(−δ/ℓ) in the order of the atoms."""
        lengthscales = dict(zip(self.filters, self.lengthscale.unbind(), strict=True))
        parts = []
        for block, variance in zip(self.blocks, self.variance.unbind(), strict=True):
            if block in self.filters:
                delta = self._distances[block].unique().to(self.mean)
                parts.append(variance * torch.exp(-delta / lengthscales[block]))
            else:
                parts.append(variance.reshape(1))
        return torch.cat(parts)

    def covariances(self) -> dict[str, Covariance]:
        """Return the filter covariance of every convolution, a variance for every other parameter."""
        lengthscales = dict(zip(self.filters, self.lengthscale.unbind(), strict=True))
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        result: dict[str, Covariance] = {}
        for (block, names), variance in zip(self.blocks.items(), self.variance.unbind(), strict=True):
            if block in self.filters:
                V = variance * torch.exp(-self._distances[block].to(self.mean) / lengthscales[block])
                result |= {name: Separable(None, V, shapes[name][0]) for name in names}
            else:
                result |= {name: Uniform(variance) for name in names}
        return result


def _partition(
    names: tuple[str, ...], kernels: dict[str, torch.Size], blocks: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """Return all blocks, in the order of their first parameters."""
    of: dict[str, str] = {}
    for block, members in blocks.items():
        for name in members:
            if name not in names or name in of:
                raise ValueError(f"blocks must name parameters once each, but {block!r} has {name!r}")
            of[name] = block
        if len({kernels.get(name) for name in members}) > 1:
            raise ValueError(f"filters of a block must be of one size, but those of {block!r} are not")
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        block = of.get(name, name)
        found[block] = (*found.get(block, ()), name)
    return found


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
