"""Several networks, each with its own posterior, as one model: a mixture."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from ntkgp.likelihoods import Likelihood
from ntkgp.linearization.inputs import Input
from ntkgp.posteriors.base import Posterior
from ntkgp.posteriors.prediction import Prediction
from ntkgp.posteriors.tuning import tune

__all__ = ["Mixture", "MixturePrediction"]


@dataclass(frozen=True, repr=False)
class MixturePrediction:
    r"""p(y) = :math:`\tfrac1K \sum_k p_k(y)` at N points, with all that a :class:`Prediction` has.

    ``epistemic`` is the members' mean, and what their means differ by.
    """

    parts: tuple[Prediction, ...]

    def __repr__(self) -> str:
        return f"MixturePrediction({len(self.parts)} of {self.parts[0]!r})"

    @property
    def mean(self) -> Tensor:  # (N, C_y)
        """E[y]."""
        return self._over_parts("mean").mean(0)

    @property
    def standard_error(self) -> Tensor:  # (N, C_y)
        """Of the mean, from sampling f; members draw independently."""
        return self._over_parts("standard_error").square().sum(0).sqrt() / len(self.parts)

    @property
    def probs(self) -> Tensor:  # (N, C)
        """Class probabilities."""
        return self._over_parts("probs").mean(0)

    @property
    def epistemic(self) -> Tensor:  # (N, C_y)
        """Var[E[y | f]], over members and over f in each."""
        return self._over_parts("epistemic").mean(0) + self._over_parts("mean").var(0, correction=0)

    @property
    def aleatoric(self) -> Tensor:  # (N, C_y)
        """E[Var[y | f]]."""
        return self._over_parts("aleatoric").mean(0)

    @property
    def variance(self) -> Tensor:  # (N, C_y)
        """Var[y]."""
        return self._over_parts("variance").mean(0) + self._over_parts("mean").var(0, correction=0)

    @property
    def entropy(self) -> Tensor:  # (N,)
        """Entropy of y, in nats."""
        if not self._likelihood.discrete:
            raise AttributeError("a mixture of continuous densities has no entropy in closed form: average −log_prob")
        return self._likelihood.entropy(self.mean)

    def log_prob(self, y: Tensor) -> Tensor:  # (N, ...) -> (N,)
        """Return log p(y) of every point, all its outputs together."""
        return torch.stack([part.log_prob(y) for part in self.parts]).logsumexp(0) - math.log(len(self.parts))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:  # (n, N, *)
        """Draw y: a member, f from its posterior, then y from its likelihood."""
        if n < 1:
            raise ValueError(f"n must be at least 1, but is {n}")
        generator = generator or torch.Generator(self.mean.device).manual_seed(0)
        chosen = _chosen(n, generator, len(self.parts))
        return _placed(n, {k: (at, self.parts[k].sample(len(at), generator)) for k, at in chosen.items()})

    @property
    def _likelihood(self) -> Likelihood:
        return self.parts[0]._likelihood

    def _over_parts(self, what: str) -> Tensor:  # (K, N, C_y)
        return torch.stack([getattr(part, what) for part in self.parts])


class Mixture(nn.Module):
    r"""p(y | x) = :math:`\tfrac1K \sum_k p_k(y \mid x)`, each p_k of a network of its own.

    A linearised network knows one mode: what data leave open around it. Networks trained from several starts, a deep
    ensemble, know several, and nothing around each. A mixture of their posteriors knows both (Eschenhagen et al. 2021).
    It costs K fits and K predictions; members are saved and loaded one by one.

    .. code-block:: python

        mixture = ntkgp.posteriors.Mixture([ntkgp.fit(net, data, "categorical") for net in nets])
        mixture.predict(x).probs

    Args:
        posteriors: the members, under likelihoods of one kind.

    Raises:
        TypeError: if a member is not a posterior.
        ValueError: if there is none, or they differ in their likelihood or number of outputs.
    """

    def __init__(self, posteriors: Sequence[Posterior]) -> None:
        super().__init__()
        members = tuple(posteriors)
        if not members:
            raise ValueError("posteriors must hold at least one, but are none")
        for member in members:
            if not isinstance(member, Posterior):
                raise TypeError(f"posteriors must hold posteriors, as fit returns them, not a {type(member).__name__}")
        kinds = sorted({f"{type(p.likelihood).__name__} with {p.lin.num_outputs} outputs" for p in members})
        if len(kinds) > 1:
            raise ValueError(f"posteriors must have one likelihood and number of outputs, but have {', '.join(kinds)}")
        self._members = nn.ModuleList(members)

    @property
    def posteriors(self) -> tuple[Posterior, ...]:
        """The members."""
        return tuple(self._members)  # type: ignore[arg-type]

    def predict(self, x: Input, generator: torch.Generator | None = None, **options: Any) -> MixturePrediction:
        """Return the predictive distribution of y at each point.

        Args:
            x: the points.
            generator: where randomness comes from; by default seed k for member k, so that predictions repeat.
            options: of :meth:`Posterior.predict`.
        """
        seeds = (generator or torch.Generator(p.lin.device).manual_seed(k) for k, p in enumerate(self.posteriors))
        pairs = zip(self.posteriors, seeds, strict=True)
        return MixturePrediction(tuple(post.predict(x, generator=own, **options) for post, own in pairs))

    def sample_functions(self, n: int, generator: torch.Generator | None = None) -> Callable[[Input], Tensor]:
        """Draw n functions, each from a member that is drawn first: callables x -> (n, N, C)."""
        if n < 1:
            raise ValueError(f"n must be at least 1, but is {n}")
        generator = generator or torch.Generator(self.posteriors[0].lin.device).manual_seed(0)
        chosen = _chosen(n, generator, len(self.posteriors))
        functions = {k: self.posteriors[k].sample_functions(len(at), generator) for k, at in chosen.items()}
        return lambda x: _placed(n, {k: (at, functions[k](x)) for k, at in chosen.items()})

    def tune(self, at: str | None = None, validation: Any = None, **options: Any) -> Self:
        """Tune each member by its evidence, or all by the mixture's score on validation data; see :func:`tune`.

        Members that are calibrated one by one make a mixture that is too unsure: what they differ by comes on top.
        """
        tune(self.posteriors, at, validation, **options)
        return self

    def refine(self, **options: Any) -> "Mixture":
        """Return the mixture of refined members; see :meth:`Posterior.refine`."""
        return Mixture([post.refine(**options) for post in self.posteriors])


def _chosen(n: int, generator: torch.Generator, K: int) -> dict[int, Tensor]:
    """Return which of n draws each member makes; without those that make none."""
    member = torch.randint(K, (n,), generator=generator, device=generator.device)
    places = {k: (member == k).nonzero().squeeze(1) for k in range(K)}
    return {k: at for k, at in places.items() if len(at)}


def _placed(n: int, parts: dict[int, tuple[Tensor, Tensor]]) -> Tensor:  # {k: ((m,), (m, *))} -> (n, *)
    _, first = next(iter(parts.values()))
    out = first.new_empty(n, *first.shape[1:])
    for at, values in parts.values():
        out[at] = values
    return out
