"""Block-diagonal matrices over points and sites: what Λ and its root R are."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ntkgp.linearization.memory import empty

__all__ = ["SiteBlocks", "from_sites", "to_sites"]


def to_sites(f: Tensor, k: int) -> Tensor:  # (..., C) -> (..., T, k)
    """Split C = k T outputs into T sites of k; the k numbers of a site lie T apart, as in an image of classes."""
    return f.unflatten(-1, (k, -1)).mT


def from_sites(f: Tensor) -> Tensor:  # (..., T, k) -> (..., C)
    """Undo :func:`to_sites`."""
    return f.mT.flatten(-2)


@dataclass(frozen=True)
class SiteBlocks:
    """A matrix (N C, N C') with one k x k' block for each of T sites of each of N points, C = k T and C' = k' T."""

    values: Tensor  # (..., N, T, k, k')

    @property
    def mT(self) -> "SiteBlocks":
        """The transpose."""
        return SiteBlocks(self.values.mT)

    def __matmul__(self, X: Tensor) -> Tensor:  # (N C', m) -> (N C, m)
        """Multiply a matrix from the left."""
        N, T, rows, k = self.values.shape[-4:]
        if k == rows == 1:
            return self.values.reshape(-1, 1) * X
        if T == 1:
            return (self.values.squeeze(-3) @ X.unflatten(0, (N, k))).flatten(0, 1)
        sites = X.unflatten(0, (N, k, T)).transpose(1, 2)  # (N, T, k, m)
        return (self.values @ sites).transpose(1, 2).flatten(0, 2)

    def apply(self, u: Tensor) -> Tensor:  # (..., N, C') -> (..., N, C)
        """Multiply each point's vector by its block."""
        k = self.values.shape[-1]
        return from_sites((self.values @ to_sites(u, k).unsqueeze(-1)).squeeze(-1))

    def dense(self) -> Tensor:  # (..., N, C, C')
        """Return each point's block as a C x C' matrix."""
        T, rows, columns = self.values.shape[-3:]
        blocks = torch.diag_embed(self.values.movedim(-3, -1))  # (..., N, k, k', T, T)
        return blocks.transpose(-3, -2).reshape(*self.values.shape[:-3], rows * T, columns * T)

    def columns(self, J: Tensor) -> Tensor:  # (N, C', p) -> (N, C, p)
        """Multiply each point's matrix from the left; J may be the largest of all there is."""
        T, rows, k = self.values.shape[-3:]
        learnt = torch.is_grad_enabled() and (self.values.requires_grad or J.requires_grad)
        if learnt or (T > 1 and max(k, rows) > 1):
            return (self @ J.flatten(0, 1)).unflatten(0, (J.shape[0], -1))
        out = empty((len(J), rows * T, J.shape[-1]), J)  # of 60 ms for a LeNet's 400 points, 45 went into new pages
        if k == rows == 1:
            return torch.mul(self.values.reshape(len(J), T, 1), J, out=out)
        return torch.bmm(self.values.squeeze(-3), J, out=out)

    def __getitem__(self, index: slice | Tensor) -> "SiteBlocks":
        """Return the blocks of the points that ``index`` selects."""
        return SiteBlocks(self.values[index])

    def detach(self) -> "SiteBlocks":
        """Return the same numbers without their graph."""
        return SiteBlocks(self.values.detach())
