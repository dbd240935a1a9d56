"""Running curvature with correlations: inputs times outputs for each layer, from random columns of the root."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ntkgp.curvature import KroneckerFactors
from ntkgp.curvature.kronecker import KroneckerBlock, random_columns
from ntkgp.linearization import Linearization
from ntkgp.linearization.inputs import Input, batch_size
from ntkgp.linearization.layout import ParameterLayout
from ntkgp.posteriors import GivenKroneckerPosterior, Posterior
from ntkgp.posteriors.model import LinearModel
from ntkgp.priors import Covariance, Prior, Uniform
from ntkgp.priors.covariance import Rotated
from ntkgp.training.autoencoders.running import NamedTensors, OutputCurvature, RunningCurvature

__all__ = ["RunningKronecker"]

_GROWTH = 1.1  # of n, from which on spectra are taken anew


class RunningKronecker(RunningCurvature):
    r"""H = :math:`\frac1n F_0 \otimes F_1` for each weight, in the order in which it is stored; F₀ alone for vectors.

    One factor is Σ g gᵀ over cotangents g, the other Σ a aᵀ over inputs a, both sums over n examples (a mean over the
    positions of a convolution, see :class:`~ntkgp.curvature.kronecker.KroneckerBlock`), so that all three are forgotten
    alike; each weight has its own n. Cotangents belong to random columns R ε of each example: as many backward passes,
    not one for each output.

    An eigendecomposition takes longer than a step, and H changes little in one: draws may be made from what it was
    ``every`` batches ago, or before n grew by a tenth. Spectra are part of the state, so that a run that goes on draws
    from the same.

    Args:
        net: the network; its weights are read at every call.
        layout: which of them are Bayesian.
        root: R of targets and outputs.
        like: a tensor of the right dtype and device.
        columns: random columns for each example of a batch.
        every: batches between eigendecompositions.

    Raises:
        ValueError: if a number is not positive.
    """

    def __init__(
        self, net: nn.Module, layout: ParameterLayout, root: OutputCurvature, like: Tensor, columns: int, every: int
    ) -> None:
        super().__init__()
        for name, value in (("columns", columns), ("every", every)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number from 1 on, but is {value}")
        self._net, self._layout, self._root = (net,), layout, root  # in a tuple: it is not a part of this
        self.columns, self.every = columns, every
        self._lin: Linearization | None = None
        zero = torch.zeros((), dtype=like.dtype, device=like.device)
        self.sums = NamedTensors({"n": zero.clone()}, self._keys("n01"))
        # How many batches spectra are behind, from the start as many as are allowed; and n when they were taken.
        self.spectra = NamedTensors(
            {"age": torch.full((), every, device=like.device), "n": zero.clone()}, self._keys("gQaW")
        )

    def _keys(self, kinds: str) -> list[str]:
        return [f"{kind}:{name}" for name in self._layout.names for kind in kinds]

    def of(self, x: Input, y: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return F₀ and F₁ of each parameter, and n."""
        lin = self._linearised(x)
        factors = KroneckerFactors()
        with torch.no_grad():
            R = self._root(y, lin(x))
            for some, uses in lin.factors(x, random_columns(R, self.columns, generator)):
                factors.add(uses, [_same], some.stop - some.start)
        n = self.sums["n"].new_tensor(float(batch_size(x)))
        found = {"n": n}
        for name, own in zip(self._layout.names, lin.layout.names, strict=True):  # compiled modules have other names
            if (block := factors.blocks.get(own)) is None:
                continue
            G, A = block.G[0], block.A
            pair = (G,) if A is None else (A, G) if block.transposed else (G, A)
            found |= {f"n:{name}": n.clone()} | {f"{side}:{name}": F for side, F in enumerate(pair)}
        return found

    def _linearised(self, x: Input) -> Linearization:
        """Return the network where it is; its graph is looked at once."""
        net = self._net[0]
        self._lin = Linearization(net, list(self._layout.names), x) if self._lin is None else self._lin.again(net)
        return self._lin

    def move(self, new: dict[str, Tensor], keep: float, weight: float) -> None:  # type: ignore[override]
        """Forget a part of what is known, and add a batch; a block that has another form now starts anew."""
        for name in self._layout.names:
            keys = [f"{kind}:{name}" for kind in "n01"]
            old, now = [[_shape(known.get(key)) for key in keys] for known in (self.sums, new)]
            if keys[1] in new and old != now:
                for key in keys:
                    self.sums.drop(key)
        super().move(new, keep, weight)
        self.spectra["age"].add_(1)

    def take(self, new: dict[str, Tensor]) -> None:  # type: ignore[override]
        """Take over sums in place of those that are known."""
        super().take(new)
        self.spectra["age"].fill_(self.every)

    def covariances(self, s: Tensor, fresh: bool = True) -> dict[str, Covariance]:  # (P,)
        """Return the covariance of each parameter, in the basis of eigenvectors; s is one number in each."""
        if not fresh and self._outdated():
            for name, now in self._spectra().items():
                self.spectra.put({f"{key}:{name}": t for key, t in now.tensors().items()})
            self.spectra["age"].zero_()
            self.spectra["n"].copy_(self.sums["n"])
        spectra = self._spectra() if fresh else self._kept()
        variances = [part[0].square() for part in s.split(self._layout.sizes)]
        return {
            name: spectra[name].covariance(v) if name in spectra else Uniform(v)
            for name, v in zip(self._layout.names, variances, strict=True)
        }

    def _outdated(self) -> bool:
        n = self.sums["n"]
        return bool((n > 0) & ((self.spectra["age"] >= self.every) | (n > _GROWTH * self.spectra["n"])))

    def _spectra(self) -> dict[str, "_Spectrum"]:
        return {name: _Spectrum.of(block) for name, block in self._blocks().items()}

    def _kept(self) -> dict[str, "_Spectrum"]:
        found = {}
        for name in self._layout.names:
            tensors = [self.spectra.get(f"{key}:{name}") for key in ("g", "Q", "a", "W")]
            if all(t is not None for t in tensors):
                found[name] = _Spectrum(*tensors)  # type: ignore[arg-type]
        return found

    def _blocks(self) -> dict[str, KroneckerBlock]:
        found = {}
        for name in self._layout.names:
            first, rest = (self.sums.get(f"{side}:{name}") for side in (0, 1))
            if first is not None:
                A = None if rest is None else rest / self.sums[f"n:{name}"]
                found[name] = KroneckerBlock(first.unsqueeze(0), A)
        return found

    def eigenvalues(self) -> Tensor:  # (P,)
        """Return the products of the factors' eigenvalues, 0 for what the network does not use."""
        spectra = self._spectra()
        sizes = zip(self._layout.names, self._layout.sizes, strict=True)
        zeros = self.sums["n"].new_zeros
        return torch.cat([spectra[name].values().flatten() if name in spectra else zeros(p) for name, p in sizes])

    def posterior(self, model: LinearModel, prior: Prior) -> Posterior:
        """Return the posterior with these factors."""
        names = dict(zip(self._layout.names, model.lin.layout.names, strict=True))
        blocks = {names[name]: block.converted(torch.clone) for name, block in self._blocks().items()}
        return GivenKroneckerPosterior.of(model, prior, model.likelihood, blocks)


@dataclass(frozen=True)
class _Spectrum:
    """(Q ⊗ W) diag(g ⊗ a) (Q ⊗ W)ᵀ."""

    g: Tensor  # (d_0,)
    Q: Tensor  # (d_0, d_0)
    a: Tensor  # (rest,)
    W: Tensor  # (rest, rest)

    @classmethod
    def of(cls, block: KroneckerBlock) -> "_Spectrum":
        (G,) = block.G
        A = G.new_ones(1, 1) if block.A is None else block.A
        (g, Q), (a, W) = torch.linalg.eigh(G), torch.linalg.eigh(A)
        # Row-major, as a state that is read from a file has them: products round by the order in memory.
        return cls(g.clamp(min=0), Q.contiguous(), a.clamp(min=0), W.contiguous())

    def tensors(self) -> dict[str, Tensor]:
        return {"g": self.g, "Q": self.Q, "a": self.a, "W": self.W}

    def values(self) -> Tensor:  # (d_0, rest)
        return torch.outer(self.g, self.a)

    def covariance(self, variance: Tensor) -> Rotated:
        """Return (H + I / variance)⁻¹."""
        return Rotated(self.Q, self.W, (self.values() + variance.reciprocal()).reciprocal())


def _shape(t: Tensor | None) -> torch.Size | None:
    return None if t is None else t.shape


def _same(J: Tensor) -> Tensor:
    return J
