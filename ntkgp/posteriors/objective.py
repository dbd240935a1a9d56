r"""The linear model as an objective: ψ(θ) = log p(y | f_lin(θ)) − ½ ‖θ − m₀‖²_{S₀⁻¹}, its gradient and its mode."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

import gpytorch
import torch
from torch import Tensor

from ntkgp.likelihoods import Expansion, Likelihood, SiteBlocks
from ntkgp.linearization import Linearization
from ntkgp.posteriors.mode import Mode
from ntkgp.posteriors.model import Chunk, LinearModel
from ntkgp.priors import Prior

__all__ = ["LinearObjective"]


class LinearObjective(gpytorch.Module):
    r"""ψ of the linear model under a prior and a likelihood, whose hyperparameters are live.

    Args:
        model: the linear model on its training data.
        prior: N(m₀, S₀).
        likelihood: p(y | f).
        shift: δ, the posterior mean of the weights less θ*; None for zero.
        sites: R at the training points, if it is not that of the likelihood at f + J δ.
    """

    method: ClassVar[str]

    def __init__(
        self,
        model: LinearModel,
        prior: Prior,
        likelihood: Likelihood,
        shift: Tensor | None = None,
        sites: SiteBlocks | None = None,
    ) -> None:
        super().__init__()
        # GPyTorch's hook is bound to the module: with it a posterior and its features would outlive `del post`.
        self._load_state_dict_pre_hooks.clear()
        self.model, self.prior, self.likelihood = model, prior, likelihood
        self.shift, self.sites = shift, sites
        self._last_mode: Tensor | None = None
        self._stamp: list[Tensor] = []
        self._found: dict[str, Any] = {}

    @property
    def lin(self) -> Linearization:
        """The linearised network."""
        return self.model.lin

    # What a structure defines

    @abstractmethod
    def _find_mode(self, start: Tensor) -> Mode:  # (P,)
        """Return the mode of the linear model under the current hyperparameters; the search starts at δ = ``start``."""

    # ψ and its parts

    def _log_joint(self, delta: Tensor) -> Tensor:  # ()
        """Return log p(y | f_lin(θ)) − ½ ‖θ − m₀‖²_{S₀⁻¹} at θ = θ* + δ."""
        return self._log_likelihood(delta) - self._quadratic(delta)

    def _log_joint_at_mode(self, **search: Any) -> Tensor:  # ()
        return self._log_joint(self.linear_mode(**search).delta)

    def _quadratic(self, delta: Tensor) -> Tensor:  # ½ ‖θ − m₀‖²_{S₀⁻¹}, ()
        distance = self.lin.theta + delta - self.prior.mean
        return distance @ self.prior.precision_times(distance) / 2

    def _log_likelihood(self, delta: Tensor) -> Tensor:  # ()
        parts = [chunk.log_prob(self.likelihood, self._moved(chunk, delta)) for chunk in self.model]
        return self.model.summed(torch.stack(parts).sum())

    def _log_prob_at(self, f: Tensor) -> Tensor:  # (N, C) -> ()
        parts = [chunk.log_prob(self.likelihood, f[chunk.points]) for chunk in self.model]
        return self.model.summed(torch.stack(parts).sum())

    def _moved(self, chunk: Chunk, delta: Tensor | None) -> Tensor:  # (n, C)
        return chunk.f if delta is None else chunk.f + chunk.push(delta.unsqueeze(0))[0]

    def _expand(self, chunk: Chunk, f: Tensor) -> Expansion:  # (n, C)
        return self.likelihood.expand(chunk.data.y, f, chunk.data.weights)

    def _site_root(self, chunk: Chunk) -> SiteBlocks:
        """Return R at the points of a chunk."""
        if self.sites is not None:
            return self.sites[chunk.points]
        return self._expand(chunk, self._moved(chunk, self.shift)).R

    def _gradient_at(self, delta: Tensor, f: Tensor) -> Tensor:  # (P,), (N, C) -> (P,)
        """Return Jᵀ r − S₀⁻¹(θ − m₀) at θ = θ* + δ, with r at latent values f."""
        return self._gradient(delta, lambda chunk: self._expand(chunk, f[chunk.points]).r)

    def _gradient(self, delta: Tensor, residual: Callable[[Chunk], Tensor]) -> Tensor:  # (P,)
        """Return Jᵀ r − S₀⁻¹(θ − m₀) at θ = θ* + δ, with the r that ``residual`` says."""
        g = torch.zeros_like(delta)
        for chunk in self.model:
            g = g + chunk.pull(residual(chunk).unsqueeze(0))[0]
        return self.model.summed(g) - self.prior.precision_times(self.lin.theta + delta - self.prior.mean)

    def linear_mode(self, **search: Any) -> Mode:
        """Return θ_⋆ − θ*, the mode of the linear model, with its certificate.

        Args:
            search: how to find it where the exact one is too dear, see :meth:`search`.
        """
        return self._current(f"mode {search}", lambda: self._found_mode(search))

    def _found_mode(self, search: dict[str, Any]) -> Mode:
        start = self._last_mode if self._last_mode is not None else self.shift
        start = torch.zeros_like(self.lin.theta) if start is None else start
        with torch.no_grad():
            mode = self.search(start=start, **search) if search else self._find_mode(start)
        self._last_mode = mode.delta  # where the next search, under other hyperparameters, starts
        return mode

    def _gain_at_mode(self) -> float | None:
        """Return how much better, in nats, the linear model explains the data than the network.

        The mode is that of the last search, which tuning ends one step after: another would cost as much as a step.
        """
        if self._last_mode is None:
            return None
        with torch.no_grad():
            here = torch.zeros_like(self._last_mode)
            return (self._log_likelihood(self._last_mode) - self._log_likelihood(here)).item()

    def search(self, solver: str = "newton", **options: Any) -> Mode:
        """Return the mode of the linear model within a tolerance, where that is cheaper than exactly.

        Args:
            solver: "newton" for inexact Newton steps over all data, in weight space
                (:meth:`WeightSpacePosterior.newton`); "descent" for minibatches, whatever the posterior
                (:func:`ntkgp.posteriors.descent.descend`).
            options: of the solver.
        """
        if solver == "newton":
            return self.newton(**options)
        if solver == "descent":
            from ntkgp.posteriors.descent import descend

            return descend(self, **options)
        raise ValueError(f'solver must be "newton" or "descent", but is {solver!r}')

    def newton(self, **options: Any) -> Mode:
        """Return the mode by inexact Newton steps, where a structure has them."""
        raise ValueError(f"method={self.method!r} finds the mode exactly and takes no {', '.join(options)}")

    # As modules are moved

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.model = self.model.converted(fn)
        self.shift = None if self.shift is None else fn(self.shift)
        self.sites = None if self.sites is None else SiteBlocks(fn(self.sites.values))
        self._forget()
        return self

    def _forget(self) -> None:
        """Drop what can be computed again."""
        self._stamp, self._found, self._last_mode = [], {}, None

    # What follows from the hyperparameters, kept while they stay

    def _current(self, key: str, make: Callable[[], Any]) -> Any:
        now = [t.detach() for t in (*self.parameters(), *self.buffers())]
        same = len(now) == len(self._stamp) and all(torch.equal(a, b) for a, b in zip(now, self._stamp, strict=True))
        if not same:
            self._stamp, self._found = [t.clone() for t in now], {}
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]
