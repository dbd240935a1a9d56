"""Independent zero-correlation priors with one precision for each group of parameters."""

from collections.abc import Hashable, Mapping, Sequence
from copy import deepcopy

import gpytorch
import torch
from gpytorch.constraints import Interval
from torch import Tensor, nn

from ntkgp.linearization import Linearization
from ntkgp.priors.base import LinearPrior, positive
from ntkgp.priors.covariance import Covariance, Uniform

__all__ = ["Grouped", "Isotropic"]


class Grouped(LinearPrior):
    r"""S₀ = diag over groups g of :math:`\alpha_g^{-1} I`.

    Args:
        lin: whose parameters the prior is over.
        by: "layer" for one group a layer, "normalized" for one group a layer that a normalisation makes scale
            invariant and one for the rest, or a partition {group: [parameter or module names]}.
        precision: α, a number for all groups, a dict by group, or a tensor (*batch, G). By default 1, and for
            "normalized" P_g / ‖θ*_g‖², which follows the weights when they are scaled.
        mean: m₀.
        precision_prior: a hyperprior on the precisions.
        precision_constraint: where the precisions may lie; positive by default.

    Raises:
        ValueError: if ``by`` is not a partition, or a precision is not positive or does not fit the groups.
    """

    def __init__(
        self,
        lin: Linearization,
        by: str | Mapping[str, Sequence[str]] = "layer",
        precision: float | Mapping[str, float] | Tensor | None = None,
        mean: float | Tensor | str = 0.0,
        precision_prior: gpytorch.priors.Prior | None = None,
        precision_constraint: Interval | None = None,
    ) -> None:
        super().__init__(lin, mean)
        self.groups = _partition(lin, by)
        if precision is None:
            precision = _mean_squares(lin, self.groups).reciprocal() if by == "normalized" else 1.0
        value = self._by_group(precision).to(self.mean)
        self._positive("precision", value, precision_constraint, precision_prior)

    @property
    def precision(self) -> Tensor:  # (*batch, G)
        """α, the precision of each group."""
        return self._get_positive("precision")

    @precision.setter
    def precision(self, value: float | Mapping[str, float] | Tensor) -> None:
        self._set_positive("precision", self._by_group(value))

    @property
    def precision_index(self) -> Tensor:  # (P,)
        """The group of each parameter."""
        group = {name: g for g, names in enumerate(self.groups.values()) for name in names}
        sizes = torch.tensor(self.layout.sizes)
        return torch.tensor([group[name] for name in self.layout.names]).repeat_interleave(sizes).to(self.mean.device)

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch of priors that this is."""
        return self.raw_precision.shape[:-1]

    @property
    def atoms(self) -> list[dict[str, Covariance]]:
        """The identity on each group."""
        one = torch.ones_like(self.mean[0])
        return [{name: Uniform(one) for name in names} for names in self.groups.values()]

    @property
    def atoms_key(self) -> Hashable:
        """What the atoms are, for caches."""
        return tuple(self.groups.items())

    def coefficients(self) -> Tensor:  # (*batch, G)
        """Return the variances 1/α."""
        return self.precision.reciprocal()

    def covariances(self) -> dict[str, Covariance]:
        """Return the variance of each parameter."""
        variances = self.coefficients().unbind(-1)
        return {
            name: Uniform(variance)
            for variance, names in zip(variances, self.groups.values(), strict=True)
            for name in names
        }

    def __getitem__(self, index: tuple) -> "Grouped":
        """Return the priors of a batch that ``index`` selects."""
        return self._with(self.raw_precision[index])

    def expand_batch(self, batch_shape: torch.Size) -> "Grouped":
        """Return a batch of this prior."""
        return self._with(self.raw_precision.expand(*batch_shape, -1))

    def _with(self, raw_precision: Tensor) -> "Grouped":
        new = deepcopy(self)
        new.raw_precision = nn.Parameter(raw_precision.detach().clone(), self.raw_precision.requires_grad)
        return new

    def _by_group(self, precision: float | Mapping[str, float] | Tensor) -> Tensor:  # (*batch, G)
        if isinstance(precision, Mapping):
            if set(precision) != set(self.groups):
                raise ValueError(f"precision must name the groups {list(self.groups)}, but names {list(precision)}")
            precision = torch.stack([torch.as_tensor(precision[group]) for group in self.groups])
        value = positive("precision", precision)
        if value.ndim == 0:
            return value.expand(len(self.groups)).clone()
        if value.shape[-1] != len(self.groups):
            raise ValueError(
                f"precision must have one entry for each of the {len(self.groups)} groups {list(self.groups)}, "
                f"but has shape {tuple(value.shape)}"
            )
        return value


class Isotropic(Grouped):
    r"""S₀ = :math:`\alpha^{-1} I`, what weight decay means.

    Args:
        lin: whose parameters the prior is over.
        precision: α, a number or a batch of them, (*batch, 1).
        mean: m₀.
        precision_prior: a hyperprior on the precision.
        precision_constraint: where the precision may lie; positive by default.
    """

    def __init__(
        self,
        lin: Linearization,
        precision: float | Tensor = 1.0,
        mean: float | Tensor | str = 0.0,
        precision_prior: gpytorch.priors.Prior | None = None,
        precision_constraint: Interval | None = None,
    ) -> None:
        super().__init__(lin, {"all": lin.layout.names}, precision, mean, precision_prior, precision_constraint)

    @classmethod
    def from_weight_decay(
        cls, lin: Linearization, weight_decay: float, num_data: int, mean: float | Tensor | str = 0.0
    ) -> "Isotropic":
        """Return the prior that weight decay stood for while training on the mean loss of ``num_data`` points.

        The mean of N negative log likelihoods plus ½ λ ‖θ‖² is 1/N of a negative log posterior with precision λ N.
        """
        return cls(lin, positive("weight_decay", weight_decay) * int(positive("num_data", num_data)), mean)


def _mean_squares(lin: Linearization, groups: Mapping[str, Sequence[str]]) -> Tensor:  # ‖θ*_g‖² / P_g, (G,)
    theta = lin.layout.split(lin.theta)
    means = [torch.cat([theta[name].flatten() for name in names]).square().mean() for names in groups.values()]
    found = torch.stack(means)
    return torch.where(found > 0, found, 1.0)  # a group of zeros says nothing of its scale


def _partition(lin: Linearization, by: str | Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    if by == "layer":
        return {group: tuple(names) for group, names in lin.groups.items()}
    if by == "normalized":
        return lin.normalized_groups()
    if isinstance(by, str):
        raise ValueError(f'by must be "layer", "normalized" or a partition, but is {by!r}')
    names = lin.layout.names
    groups = {
        group: tuple(
            name for name in names if any(name == wanted or name.startswith(f"{wanted}.") for wanted in members)
        )
        for group, members in by.items()
    }
    listed = [name for members in groups.values() for name in members]
    problems = {
        "missing": [name for name in names if name not in listed],
        "twice": sorted({name for name in listed if listed.count(name) > 1}),
        "empty": [group for group, members in groups.items() if not members],
    }
    if any(problems.values()):
        found = ", ".join(f"{what}: {which}" for what, which in problems.items() if which)
        raise ValueError(f"by must put every parameter into exactly one group, but {found}")
    return groups
