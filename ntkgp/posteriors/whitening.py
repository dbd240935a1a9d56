r"""The prior process seen through its inducing values: K_ZZ, K_xZ, k(x, x) and μ, each computed once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from ntkgp.linearization import Features, Linearization
from ntkgp.linearization.inputs import Input
from ntkgp.operators import gram, point_blocks
from ntkgp.posteriors.data import Data
from ntkgp.posteriors.model import split
from ntkgp.priors import Covariance

__all__ = ["InducingKernel", "RowTable", "Rows", "whitener"]


@dataclass(frozen=True)
class Rows:
    """What the prior says of n points, with a share for each atom S_j of the prior covariance S₀ = Σ_j w_j S_j."""

    f: Tensor  # (n, C), f(x; θ*)
    moved: Tensor  # (n, C), J(x)(m₀ − θ*)
    cross: Tensor  # (n, atoms, C, M), covariance with the inducing values
    own: Tensor  # (n, atoms, C, C), k(x, x)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return everything held."""
        return self.f, self.moved, self.cross, self.own

    def __getitem__(self, index: Tensor) -> "Rows":
        """Return the points that ``index`` selects."""
        return Rows(*(t[index] for t in self.tensors()))

    def whitened(self, w: Tensor, L: Tensor) -> tuple[Tensor, Tensor]:  # (atoms,), (M, M) -> (n C, M), (n, C, C)
        """Return W = K_xZ L⁻ᵀ and k(x, x) in float64, differentiable in w and L."""
        K = torch.einsum("a,nacm->ncm", w, self.cross).flatten(0, 1).double()
        own = torch.einsum("a,nacd->ncd", w, self.own).double()
        return solve_triangular(L, K.mT, upper=False).mT, own


@dataclass(frozen=True)
class InducingKernel:
    """J S_j Jᵀ between inducing values and points, by atom.

    Args:
        lin: the linearised network.
        Z: the features of the inducing values.
        atoms: S_j; graphs that they or Z hold are kept.
        by_atom: whether these are the atoms of a linear prior, or S₀ itself is the only one.
        before: m₀ − θ*, (P,).
    """

    lin: Linearization
    Z: Features
    atoms: Sequence[dict[str, Covariance]]
    by_atom: bool
    before: Tensor

    @cached_property
    def inner(self) -> Tensor:  # (atoms, M, M)
        """The share of each atom in K_ZZ."""
        return torch.stack([gram(self.Z, None, atom) for atom in self.atoms])

    def rows(self, x: Input) -> Rows:
        """Return what the prior says of these points: the network is differentiated at them."""
        with torch.no_grad():
            f, F = self.lin(x), self.lin.features(x)
            moved = F.jvp(split(self.lin, self.before.unsqueeze(0)))[0]
        return Rows(f, moved, self.cross(F), torch.stack([point_blocks(F, None, a) for a in self.atoms], dim=1))

    def cross(self, F: Features) -> Tensor:  # (n, atoms, C, M)
        """Return the share of each atom in K_xZ."""
        parts = [gram(F, self.Z, atom) for atom in self.atoms]
        return torch.stack([K.unflatten(0, (F.num_examples, -1)) for K in parts], dim=1)


class RowTable:
    """The rows of all training points, each computed when first asked for.

    They are computed block by block of the data as they lie: whatever order they are asked for in, the same numbers
    come, so that a run that goes on from a checkpoint sees what it would have seen.

    Args:
        kernel: what computes them.
        data: the training points.
        size: points in a block.
    """

    def __init__(self, kernel: InducingKernel, data: Data, size: int) -> None:
        self.kernel, self.data, self.size = kernel, data, size
        self._filled = torch.zeros(-(-len(data) // size), dtype=torch.bool)
        self._rows: Rows | None = None

    def __getitem__(self, index: Tensor) -> Rows:
        """Return the rows of the points that ``index`` selects."""
        for block in (index.cpu() // self.size).unique().tolist():
            if not self._filled[block]:
                self._fill(block)
        assert self._rows is not None
        return self._rows[index]

    def _fill(self, block: int) -> None:
        at = slice(block * self.size, (block + 1) * self.size)
        with torch.no_grad():
            found = self.kernel.rows(self.data[at].x)
            if self._rows is None:
                self._rows = Rows(*(t.new_empty(len(self.data), *t.shape[1:]) for t in found.tensors()))
            for whole, part in zip(self._rows.tensors(), found.tensors(), strict=True):
                whole[at] = part
        self._filled[block] = True


def whitener(inner: Tensor, w: Tensor, nugget: float) -> tuple[Tensor, Tensor]:  # (atoms, M, M), (atoms,)
    r"""Return L with L Lᵀ = K_ZZ + ε I, and ε, ``nugget`` times the largest variance; in float64, differentiable.

    Inducing variables may be any that are jointly Gaussian with f: these are values seen through noise of variance ε,
    so that what is bounded stays bounded, to the last digit, by bounds that use this L.

    Raises:
        LinAlgError: if the matrix is not positive definite.
    """
    K = torch.tensordot(w, inner, 1).double()
    epsilon = nugget * K.diagonal().amax()
    L, info = torch.linalg.cholesky_ex(K + epsilon * torch.eye(len(K)).to(K))
    if info.item():
        raise torch.linalg.LinAlgError(
            f"K_ZZ of {len(K)} inducing values is not positive definite in {inner.dtype} with nugget={nugget:.1e} "
            f"(row {info.item()}): use lin.double(), fewer or other inducing points, or a larger nugget"
        )
    return L, epsilon
