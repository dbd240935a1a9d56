"""Kronecker factors of Jᵀ Λ J, layer by layer (Martens & Grosse 2015), with all C columns of the curvature's root."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ntkgp.linearization.factors import Factor, Outer

__all__ = ["KroneckerBlock", "KroneckerFactors", "random_columns"]


class Root(Protocol):
    """R at the outputs of n examples, as ``likelihood.expand(y, f).R`` has it."""

    @property
    def values(self) -> Tensor:  # (n, T, k, k')
        """The blocks, one for each of T sites."""

    def apply(self, u: Tensor) -> Tensor:  # (S, n, C') -> (S, n, C)
        """Multiply each example's vector by its block."""


def random_columns(R: Root, count: int, generator: torch.Generator) -> Tensor:  # (S, n, C)
    """Return u = R ε / √S for S draws of ε, so that Σ_s u uᵀ has mean Λ: S backward passes stand for C."""
    n, T, _, k = R.values.shape
    noise = torch.randn(count, n, T * k, generator=generator, dtype=R.values.dtype, device=R.values.device)
    return R.apply(noise) / count**0.5


@dataclass
class KroneckerBlock:
    r"""G ⊗ A for one parameter, first its outputs, then its inputs; A is None for a bias and what has no inputs.

    A weight that meets T inputs an example, as that of a convolution, is treated as if the T N meetings were
    independent ("expand", Eschenhagen et al. 2023):

    .. math:: \frac{1}{N T} \sum_{nt} g g^\top \otimes \sum_{nt} a a^\top

    So is a bias, whose input is 1. Parameters that are no matrices have their exact block.
    """

    G: Tensor  # (atoms, d_out, d_out)
    A: Tensor | None  # (d_in, d_in), the mean over examples and positions
    transposed: bool = False  # the parameter is stored (d_in, d_out)

    def converted(self, fn: Callable[[Tensor], Tensor]) -> "KroneckerBlock":
        """Return the block in another dtype or on another device."""
        return KroneckerBlock(fn(self.G), None if self.A is None else fn(self.A), self.transposed)


@dataclass
class KroneckerFactors:
    """Factors of every parameter, summed over examples."""

    blocks: dict[str, KroneckerBlock] = field(default_factory=dict)
    num_examples: int = 0

    def add(self, factors: dict[str, list[Factor]], weigh: Sequence[Callable[[Tensor], Tensor]], n: int) -> None:
        """Add the examples of a batch.

        Args:
            factors: for each parameter, the factors of its uses.
            weigh: for each atom of Λ, what turns (n, C, p) into Rᵀ times it.
            n: examples in the batch.
        """
        for name, uses in factors.items():
            new = _block(uses, weigh, n)
            old = self.blocks.get(name)
            if old is None:
                self.blocks[name] = new
            else:
                old.G += new.G
                if old.A is not None and new.A is not None:
                    old.A += new.A
        self.num_examples += n

    def finished(self) -> dict[str, KroneckerBlock]:
        """Return the blocks, with the inputs' factor averaged."""
        return {
            name: KroneckerBlock(b.G, None if b.A is None else b.A / self.num_examples, b.transposed)
            for name, b in self.blocks.items()
        }


def _block(uses: list[Factor], weigh: Sequence[Callable[[Tensor], Tensor]], n: int) -> KroneckerBlock:
    outers = [use for use in uses if isinstance(use, Outer)]
    alike = len({(outer.A is None, outer.has_indices, outer.transposed, outer.d_in) for outer in outers}) == 1
    if len(outers) < len(uses) or not alike:  # tied weights may meet data from either side
        J = torch.stack([use.dense().expand(n, -1, -1) for use in uses]).sum(0)
        return KroneckerBlock(torch.stack([_square(w(J)) for w in weigh]), None)
    T = sum(outer.positions for outer in outers)
    A = None if outers[0].A is None else torch.stack([_inputs(outer) for outer in outers]).sum(0) / T
    G = []
    for w in weigh:
        parts = []
        for outer in outers:
            cotangents = outer.G.expand(n, -1, -1, -1)
            parts.append(_square(w(cotangents.flatten(2)).unflatten(-1, cotangents.shape[2:])))
        G.append(torch.stack(parts).sum(0))
    return KroneckerBlock(torch.stack(G), A, outers[0].transposed)


def _inputs(outer: Outer) -> Tensor:  # Σ a aᵀ, (d_in, d_in)
    if outer.has_indices:
        return torch.bincount(outer.inputs.flatten(), minlength=outer.d_in).to(outer.G).diag()
    return _square(outer.inputs)


def _square(X: Tensor) -> Tensor:  # (..., d) -> (d, d)
    X = X.flatten(0, -2)
    return X.mT @ X
