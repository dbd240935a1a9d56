"""The curvature of data as sums that are moved batch by batch: what a Gaussian over weights is read from."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ntkgp.curvature import LayerwiseCurvature
from ntkgp.curvature.layerwise import size_limit
from ntkgp.likelihoods import SiteBlocks
from ntkgp.linearization.inputs import Input
from ntkgp.linearization.layout import ParameterLayout
from ntkgp.posteriors import GivenDiagonalPosterior, Posterior
from ntkgp.posteriors.model import LinearModel
from ntkgp.priors import Covariance, Elementwise, Prior
from ntkgp.training.smoothness import evaluating

__all__ = ["NamedTensors", "OutputCurvature", "RunningCurvature", "RunningDiagonal"]

OutputCurvature = Callable[[Tensor, Tensor], SiteBlocks]  # targets, outputs -> R


class NamedTensors(nn.Module):
    """Buffers that come with a ``state_dict``, as many as it has.

    Args:
        start: those that are there from the start, and stay; one of them tells the dtype and the device of others.
        others: names that may come.
    """

    def __init__(self, start: Mapping[str, Tensor], others: Iterable[str] = ()) -> None:
        super().__init__()
        self._start, self._others = frozenset(map(_key, start)), frozenset(map(_key, others))
        self.put(start)

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over tensors under their names."""
        for name, t in tensors.items():
            self.register_buffer(_key(name), t)

    def get(self, name: str) -> Tensor | None:
        """Return a tensor, or None."""
        return self._buffers.get(_key(name))

    def drop(self, name: str) -> None:
        """Forget a tensor, if it is there."""
        self._buffers.pop(_key(name), None)

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor that is there."""
        found = self.get(name)
        if found is None:
            raise KeyError(name)
        return found

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args: Any) -> None:
        like = next(t for t in self.buffers() if t.is_floating_point())
        for name in self._buffers.keys() - self._start:
            self.drop(name)
        for name in sorted(self._others):
            if prefix + name in state_dict:
                self.register_buffer(
                    name, torch.empty_like(state_dict[prefix + name], device=like.device, dtype=like.dtype)
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


def _key(name: str) -> str:
    return name.replace(".", "/")  # torch does not allow dots


class RunningCurvature(nn.Module):
    """H of data, in some structure, as sums over them: each sum X moves alike, X ← keep X + weight X_batch."""

    sums: NamedTensors

    @abstractmethod
    def of(self, x: Input, y: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the sums of a batch, at the weights as they are.

        Args:
            x: inputs.
            y: their targets.
            generator: where randomness comes from.
        """

    @abstractmethod
    def covariances(self, s: Tensor, fresh: bool = True) -> dict[str, Covariance]:  # (P,)
        """Return (H + diag(1/s²))⁻¹ by parameter.

        Args:
            s: the prior's standard deviations.
            fresh: whether H has to be that of this very step, or may be a few steps old.
        """

    @abstractmethod
    def eigenvalues(self) -> Tensor:  # (P,)
        """Return the eigenvalues of H."""

    @abstractmethod
    def posterior(self, model: LinearModel, prior: Prior) -> Posterior:
        """Return the posterior of a linear model under this curvature."""

    def move(self, new: Mapping[str, Tensor], keep: float, weight: float) -> None:
        """Forget a part of what is known, and add a batch.

        Args:
            new: the sums of the batch.
            keep: what the old sums are multiplied by.
            weight: what the new ones are multiplied by.
        """
        for old in self.sums.buffers():
            old.mul_(keep)
        for name, t in new.items():
            known = self.sums.get(name)
            self.sums.put({name: weight * t if known is None else known.add_(t, alpha=weight)})

    def take(self, new: Mapping[str, Tensor]) -> None:
        """Take over sums in place of those that are known."""
        for name in [name for name, _ in self.sums.named_buffers()]:
            self.sums.drop(name)
        self.sums.put(new)


class RunningDiagonal(RunningCurvature):
    """H = diag(h).

    Args:
        net: the network; its weights are read at every call.
        layout: which of them are Bayesian.
        root: R of targets and outputs.
        like: a tensor of the right dtype and device.
        method: "approximate", "mixed" or "exact", see :meth:`LayerwiseCurvature.diagonal`.
        bound: for "mixed", up to how many columns M is whole.

    Raises:
        ValueError: if the method is not known, its bound is not due or missing, or the network cannot be followed.
    """

    def __init__(
        self,
        net: nn.Module,
        layout: ParameterLayout,
        root: OutputCurvature,
        like: Tensor,
        method: str,
        bound: float | None,
    ) -> None:
        super().__init__()
        size_limit(method, bound)
        self._net, self._layout, self._root = (net,), layout, root  # in a tuple: it is not a part of this
        self.method, self.bound = method, bound
        with evaluating(net):
            self._layers = LayerwiseCurvature(net)
        self.sums = NamedTensors({"h": torch.zeros(layout.num_params, dtype=like.dtype, device=like.device)})

    def of(self, x: Input, y: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return h; nothing in it is random."""
        with evaluating(self._net[0]):
            parts = self._layers.diagonal(x, lambda f: self._root(y, f), self.method, self.bound)
        return {"h": torch.cat([parts[name] for name in self._layout.names])}

    def covariances(self, s: Tensor, fresh: bool = True) -> dict[str, Covariance]:  # (P,)
        """Return 1 / (h + 1/s²)."""
        parts = (self.sums["h"] + s**-2).reciprocal().split(self._layout.sizes)
        return {name: Elementwise(part) for name, part in zip(self._layout.names, parts, strict=True)}

    def eigenvalues(self) -> Tensor:  # (P,)
        """Return h."""
        return self.sums["h"]

    def posterior(self, model: LinearModel, prior: Prior) -> Posterior:
        """Return the posterior with these variances."""
        variances = (
            self.sums["h"] + prior.covariance_times(torch.ones_like(model.lin.theta)).reciprocal()
        ).reciprocal()
        return GivenDiagonalPosterior.of(model, prior, model.likelihood, variances.detach())
