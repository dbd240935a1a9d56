"""A prior process, its inducing values, and what of them is kept while hyperparameters change."""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ntkgp.linearization import Linearization
from ntkgp.linearization.inputs import Input, leaves, map_leaves, rebuild
from ntkgp.posteriors.bound import View
from ntkgp.posteriors.data import Data
from ntkgp.posteriors.feed import Feed
from ntkgp.posteriors.inducing import Inducing
from ntkgp.posteriors.model import LinearModel
from ntkgp.posteriors.whitening import InducingKernel, RowTable, whitener
from ntkgp.priors import LinearPrior, Prior

__all__ = ["Points", "SparseProcess"]

_PIECE_BYTES = 256 << 20  # what the numbers of the points that are looked at together may take
_BLOCK = 512  # of these points, at most


class Points(nn.ParameterList):
    """Inducing points as parameters, which learn or do not.

    Args:
        inducing: where they start.
        learn: whether they move in input space.

    Raises:
        ValueError: if they should but are no floating-point numbers.
    """

    def __init__(self, inducing: Inducing, learn: bool) -> None:
        floating = [leaf.is_floating_point() for leaf in leaves(inducing.x)]
        if learn and not any(floating):
            raise ValueError("learn_inducing needs inputs of floating-point numbers, but these are integers")
        super().__init__(
            nn.Parameter(leaf.detach().clone(), requires_grad=learn and moves)
            for leaf, moves in zip(leaves(inducing.x), floating, strict=True)
        )
        self._structure: Input = map_leaves(lambda leaf: leaf.detach()[:0], inducing.x)
        self._outputs = inducing.outputs

    def inducing(self) -> Inducing:
        """Return the inducing values where they are now."""
        outputs = None if self._outputs is None else self._outputs.to(self[0].device)
        return Inducing(rebuild(self._structure, *self), outputs)


@dataclass
class SparseProcess:
    """g ~ GP(0, J S₀ Jᵀ) seen through inducing values, on the training data.

    Kernels with a linear prior are kept atom by atom, so that no change of hyperparameters makes the network be
    differentiated again; others for the hyperparameters there are, or if these learn, computed as they are needed.

    Args:
        model: the training data.
        prior: S₀.
        points: where the inducing values are.
        nugget: ε beside the largest prior variance.
        N: how many training points there are.
        kept: what is kept; shared between processes that differ in their likelihood or mean alone.
    """

    model: LinearModel
    prior: Prior
    points: Points
    nugget: float
    N: int
    kept: "dict[str, Kept]" = field(default_factory=dict)

    @property
    def lin(self) -> Linearization:
        """The linearised network."""
        return self.model.lin

    @property
    def num_values(self) -> int:
        """M."""
        return self.points.inducing().num_values(self.lin)

    def view(self, learning: bool, free: bool) -> tuple[InducingKernel, View]:
        """Return the inducing values' kernel, and L, under the current hyperparameters; with graphs if learning."""
        kernel = self._kernel(learning)
        linear = kernel.by_atom and isinstance(self.prior, LinearPrior)
        w = self.prior.coefficients() if linear else torch.ones_like(self.lin.theta[:1])
        w = w if learning else w.detach()
        L, epsilon = whitener(kernel.inner, w, self.nugget)
        return kernel, View(w, L, epsilon, free)

    def feed(self, learning: bool) -> Feed:
        """Return the training data with their rows."""
        table = None if self._is_new_each_time(learning) else self._keep(learning).table
        return Feed(self.model, self._piece_size(), table, self.N)

    def _is_new_each_time(self, learning: bool) -> bool:
        curved = not isinstance(self.prior, LinearPrior) and _learns(self.prior)
        return learning and (curved or _learns(self.points))

    def _kernel(self, learning: bool) -> InducingKernel:
        if not self._is_new_each_time(learning):
            return self._keep(learning).kernel
        moves = _learns(self.points)
        Z = self.points.inducing().features(self.lin) if moves else self._keep(False).kernel.Z
        linear = isinstance(self.prior, LinearPrior)
        atoms = self.prior.atoms if isinstance(self.prior, LinearPrior) else [self.prior.covariances()]
        return InducingKernel(self.lin, Z, atoms, linear, self.prior.mean - self.lin.theta)

    def _keep(self, learning: bool) -> "Kept":
        """Return the kernel and the rows of training points that belong to these inducing values, made now if need be.

        With a share for each atom, if these fit the memory or the coefficients learn; else under the current prior.
        """
        prior, budget = self.prior, self.model.memory_budget
        with torch.no_grad():
            atoms, key = [prior.covariances()], None
            belongs = [*self.points, prior.mean]
            if isinstance(prior, LinearPrior) and (
                (learning and _learns(prior)) or self._table_bytes(len(prior.atoms)) <= budget
            ):
                atoms, key = prior.atoms, prior.atoms_key
            else:
                belongs += prior.parameters()
            name = "whole" if key is None else "atoms"
            kept = self.kept.get(name)
            if kept is None or not kept.is_for(belongs, key):
                Z = self.points.inducing().features(self.lin)
                kernel = InducingKernel(self.lin, Z, atoms, key is not None, prior.mean - self.lin.theta)
                fits = isinstance(self.model.source, Data) and self._table_bytes(len(atoms)) <= budget
                table = RowTable(kernel, self.model.data, self._piece_size()) if fits else None
                kept = self.kept[name] = Kept([t.detach().clone() for t in belongs], key, kernel, table)
        return kept

    def row_bytes(self, atoms: int) -> int:
        """Return what the rows of a point take."""
        C, M = self.lin.num_outputs, self.num_values
        return (atoms * C * (C + M) + 2 * C) * self.lin.dtype.itemsize

    def _table_bytes(self, atoms: int) -> int:
        return self.N * self.row_bytes(atoms)

    def _piece_size(self) -> int:
        C, M = self.lin.num_outputs, self.num_values
        rows = _PIECE_BYTES // (4 * 8 * C * (M + C))  # four matrices of such rows, in float64
        return max(1, min(_BLOCK, rows, self.model.memory_budget // (4 * self.model._bytes_each)))


@dataclass(frozen=True)
class Kept:
    """A kernel of inducing values with rows of training points, and what they belong to."""

    belongs: list[Tensor]
    key: Hashable
    kernel: InducingKernel
    table: RowTable | None

    def is_for(self, belongs: list[Tensor], key: Hashable) -> bool:
        """Tell whether nothing has changed."""
        return key == self.key and len(belongs) == len(self.belongs) and all(map(torch.equal, belongs, self.belongs))


def _learns(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())
