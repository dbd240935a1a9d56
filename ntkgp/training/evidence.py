"""Training that sets its own weight decay: precisions by the evidence while the weights are learnt (MacKay 1992)."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ntkgp.likelihoods import Likelihood
from ntkgp.linearization import Linearization
from ntkgp.posteriors import Posterior
from ntkgp.posteriors.data import Source
from ntkgp.posteriors.fit import STRUCTURES
from ntkgp.posteriors.model import LinearModel
from ntkgp.posteriors.subsets import Random
from ntkgp.priors import Grouped, Prior
from ntkgp.training.maximum import MaximumAPosteriori

__all__ = ["EvidenceTraining"]


class EvidenceTraining(MaximumAPosteriori):
    r"""MAP training with a precision α_g for each group of weights, moved by MacKay's fixed point every few epochs.

    At the current weights μ, with γ_g the number of parameters of a group that the data determine,

    .. math:: \alpha_g \leftarrow \gamma_g / \|\mu_g\|^2, \qquad \sigma^2 \leftarrow \|y - f\|^2 / (N C - \gamma)

    under the Laplace evidence at μ, ``log_evidence(at="map")``. The weights with the largest evidence are those that
    training ends with, without validation data. γ_g close to P_g says that a group may be too small; γ that stays when
    the network grows, that the smaller one was enough.

    Args:
        net: the network.
        likelihood: a name or an object; Gaussian noise that requires gradients moves by the fixed point as well.
        num_data: N.
        prior_std: s = α^(−1/2) at the start, a number, or {parameter or module name: number}, the same in a group.
        seed: of order and noise.
        by: "layer", or a partition {group: [parameter or module names]}.
        structure: of the posterior that the evidence comes from: "full", "kron" or "diag".
        burn_in: epochs before the first update.
        every: epochs between updates, F.
        steps: of the fixed point at each update, all at the same weights.
        patience: updates without a larger evidence after which training stops; None for never.
        subset: how many points, drawn once, the evidence is computed from, each for N/M of them; None for all.
        memory_budget: bytes that the features of these points may take.

    Raises:
        ValueError: if a name is not known, or a number is out of range.
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: str | Likelihood = "categorical",
        num_data: int | None = None,
        prior_std: float | Mapping[str, float] = 1.0,
        seed: int = 0,
        by: str | Mapping[str, Sequence[str]] = "layer",
        structure: str = "kron",
        burn_in: int = 5,
        every: int = 5,
        steps: int = 1,
        patience: int | None = None,
        subset: int | None = None,
        memory_budget: int = 4 << 30,
    ) -> None:
        super().__init__(net, likelihood, num_data, prior_std, 1.0, seed)
        if structure not in ("full", "kron", "diag"):
            raise ValueError(f"structure must be one of full, kron, diag, but is {structure!r}")
        for name, value, least in (("burn_in", burn_in, 0), ("every", every, 1), ("steps", steps, 1)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, but is {value}")
        if patience is not None and patience < 1:
            raise ValueError(f"patience must be at least 1, but is {patience}")
        self.structure, self.burn_in, self.every, self.steps = structure, burn_in, every, steps
        self.patience, self.subset, self.memory_budget = patience, subset, memory_budget
        prior = Grouped(Linearization(net, list(self.layout.names)), by)
        self.groups = prior.groups
        self._told |= {"structure": structure, "groups": str(self.groups), "steps": str(steps), "subset": str(subset)}
        self._told |= {"burn_in": str(burn_in), "every": str(every)}
        self._index = prior.precision_index
        self.register_buffer("precision", self._by_group())
        self.precision: Tensor  # (G,)
        # What had the largest evidence: modules, so that state_dict and checkpoints have them.
        self.best_net = deepcopy(net).requires_grad_(False)
        self.best_likelihood = deepcopy(self.likelihood).requires_grad_(False)
        self.register_buffer("best_precision", self.precision.clone())
        self.best_precision: Tensor

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """Return the weights alone: hyperparameters move by evidence."""
        return super().parameter_groups(lr)[:1]

    def sizes(self) -> Tensor:  # (G,)
        """Return P_g, the number of parameters of each group."""
        return self._index.bincount(minlength=len(self.groups))

    def update(self, lin: Linearization, source: Source) -> dict[str, Any]:
        """Move the hyperparameters at the current weights, and return the evidence under the new ones.

        Args:
            lin: the network, linearised where it is.
            source: the training data.

        Returns:
            ``log_evidence``; ``effective_parameters``, ``parameters`` and ``precision`` by group; ``noise`` if any.
        """
        posterior = self._laplace(lin, source, self.likelihood)
        posterior.tune(at="map", method="fixed_point", steps=self.steps, progress=False)
        with torch.no_grad():
            self._set_precision(posterior.prior.precision)
            value = posterior.log_evidence(at="map").item()
        told = {
            "effective_parameters": posterior.effective_parameters(),
            "parameters": self.sizes(),
            "precision": self.precision,
        }
        found: dict[str, Any] = {"log_evidence": value}
        found |= {name: dict(zip(self.groups, numbers.tolist(), strict=True)) for name, numbers in told.items()}
        noise = getattr(self.likelihood, "noise", None)
        return found if noise is None else found | {"noise": noise.tolist()}

    def after_epoch(self, epoch: int, lin: Linearization, source: Source) -> dict[str, Any]:
        """Update after the burn-in, every few epochs; keep what has the largest evidence."""
        if epoch + 1 < self.burn_in or (epoch + 1 - self.burn_in) % self.every:
            return {}
        found = self.update(Linearization(self.net, list(self.layout.names), lin.example), source)
        if found["log_evidence"] > max(self._evidences(), default=-float("inf")):
            self.best_net.load_state_dict(self.net.state_dict())
            self.best_likelihood.load_state_dict(self.likelihood.state_dict())
            self.best_precision.copy_(self.precision)
        return found

    @property
    def finished(self) -> bool:
        """Whether the evidence has not grown for ``patience`` updates."""
        found = self._evidences()
        return self.patience is not None and len(found) - found.index(max(found)) > self.patience if found else False

    def settle(self) -> None:
        """Go back to the weights and hyperparameters with the largest evidence."""
        if self._evidences():
            self.net.load_state_dict(self.best_net.state_dict())
            self.likelihood.load_state_dict(self.best_likelihood.state_dict())
            self._set_precision(self.best_precision)

    def prior_over(self, lin: Linearization) -> Prior:
        """Return the prior with the precisions as they are now."""
        return Grouped(lin, self.groups, self.precision.detach().clone())

    def posterior_of(self, model: LinearModel, prior: Prior) -> Posterior:
        """Return the Laplace posterior of the structure whose evidence was maximised."""
        return STRUCTURES[self.structure](model, prior, model.likelihood)

    def _laplace(self, lin: Linearization, source: Source, likelihood: Likelihood) -> Posterior:
        model, prior = LinearModel(lin, source, likelihood, self.memory_budget), self.prior_over(lin)
        if self.subset is not None:
            model = model.with_source(Random(self.subset, self.seed)(model, prior))
        return self.posterior_of(model, prior)

    def _evidences(self) -> list[float]:
        return [entry["log_evidence"] for entry in self.history if "log_evidence" in entry]

    def _by_group(self) -> Tensor:  # (G,)
        s = [self.prior_std[self._index == g] for g in range(len(self.groups))]
        for name, part in zip(self.groups, s, strict=True):
            if (part != part[0]).any():
                raise ValueError(f"prior_std must be the same in all of group {name!r}, but is not")
        return torch.stack([part[0] for part in s]) ** -2

    def _set_precision(self, precision: Tensor) -> None:  # (G,)
        self.precision.copy_(precision)
        self.prior_std.copy_(precision[self._index].rsqrt())
