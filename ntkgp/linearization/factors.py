"""The Jacobian of one parameter, for N examples and C outputs: as an outer product over positions, or dense."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ntkgp.linearization.memory import empty

__all__ = ["Dense", "Factor", "Outer", "concatenate_positions"]


@dataclass(frozen=True)
class Dense:
    """J itself, of a parameter with p numbers."""

    J: Tensor  # (N, C, p)

    def dense(self) -> Tensor:  # (N, C, p)
        """Return J."""
        return self.J

    def __getitem__(self, index: slice) -> "Dense":
        """Return the examples that ``index`` selects."""
        return Dense(self.J[index])

    def detach(self) -> "Dense":
        """Return the same numbers without their graph."""
        return Dense(self.J.detach())


@dataclass(frozen=True)
class Outer:
    r"""J = :math:`\sum_t g_t \otimes a_t`, the gradient of a matrix that meets T inputs a and T cotangents g.

    The parameter is (d_out, d_in), or (d_in, d_out) if ``transposed``. ``A`` may also hold indices (an embedding meets
    unit vectors), or be None (a bias meets ones, and d_in = 1 is dropped). ``shared`` cotangents are the same for all
    examples, as those of a network's last layer are.
    """

    G: Tensor  # (N, C, T, d_out), or (1, C, 1, d_out) if shared
    A: Tensor | None  # (N, T, d_in), or (N, T) indices below d_in
    d_in: int
    transposed: bool = False
    shared: bool = False

    @property
    def positions(self) -> int:
        """T."""
        return self.G.shape[2]

    @property
    def inputs(self) -> Tensor:  # (N, T, d_in), or (N, T) indices
        """A of a weight."""
        if self.A is None:
            raise ValueError("a bias has no inputs")
        return self.A

    @property
    def has_indices(self) -> bool:
        """Whether the inputs are unit vectors, kept as indices."""
        return self.A is not None and not self.A.is_floating_point()

    def __getitem__(self, index: slice) -> "Outer":
        """Return the examples that ``index`` selects."""
        return replace(self, G=self.G if self.shared else self.G[index], A=None if self.A is None else self.A[index])

    def detach(self) -> "Outer":
        """Return the same numbers without their graph."""
        return replace(self, G=self.G.detach(), A=None if self.A is None else self.A.detach())

    def allocate(self, n: int) -> "Outer":
        """Return a factor like this with room for ``n`` examples."""
        G = self.G if self.shared else empty((n, *self.G.shape[1:]), self.G)
        return replace(self, G=G, A=None if self.A is None else self.A.new_empty(n, *self.A.shape[1:]))

    def dense(self, out: Tensor | None = None) -> Tensor:  # (N, C, d_out d_in)
        """Contract the positions: 2 N C T d_in d_out flops; into ``out`` where that saves a copy."""
        if self.A is None:
            return self.G.sum(-2)
        N, C, T, d_out = self.A.shape[0], *self.G.shape[1:]
        G = self.G.expand(N, C, T, d_out)
        if self.has_indices:
            J = G.new_zeros(N, C, self.d_in, d_out)
            J = J.scatter_add(2, self.A[:, None, :, None].expand_as(G), G)
            return (J if self.transposed else J.mT).flatten(-2)
        G = G.mT.reshape(N, C * d_out, T)
        if torch.is_grad_enabled() and (G.requires_grad or self.A.requires_grad):
            J = G @ self.A
        else:  # where large results have their pages: J may be the largest of all
            place = None if out is None or self.transposed else out.view(N, C * d_out, self.d_in)
            J = torch.bmm(G, self.A, out=empty((N, C * d_out, self.d_in), G) if place is None else place)
        J = J.view(N, C, d_out, self.d_in)
        return (J.mT if self.transposed else J).flatten(-2)

    def jvp(self, v: Tensor, b: Tensor | None) -> Tensor:  # (S, d_out d_in), (S, d_out) -> (S, N, C)
        """Return the product with a change v of the weight, and b of the bias, S of them."""
        d_out = self.G.shape[-1]
        V = v.unflatten(-1, (self.d_in, d_out)) if self.transposed else v.unflatten(-1, (d_out, self.d_in)).mT
        N, T = self.inputs.shape[:2]
        inputs = self.inputs.flatten(0, 1)
        moved = V[:, inputs] if self.has_indices else inputs @ V  # (S, N T, d_out)
        moved = (moved if b is None else moved + b.unsqueeze(1)).unflatten(1, (N, T))
        if self.shared:
            return moved.sum(2) @ self.G[0, :, 0].mT
        return (self.G.flatten(2) @ moved.flatten(2).permute(1, 2, 0)).permute(2, 0, 1)

    def vjp(self, u: Tensor) -> tuple[Tensor, Tensor]:  # (S, N, C) -> (S, d_out d_in), (S, d_out)
        """Return the pull-back of S cotangents to the weight, and to the bias that shares its positions."""
        N, T = self.inputs.shape[:2]
        if self.shared:
            g = (u @ self.G[0, :, 0]).repeat_interleave(T, dim=1)  # (S, N T, d_out)
        else:
            g = (u.transpose(0, 1) @ self.G.flatten(2)).transpose(0, 1).reshape(len(u), N * T, -1)
        if self.has_indices:
            W = g.new_zeros(len(u), self.d_in, g.shape[-1]).index_add_(1, self.inputs.flatten(), g).mT
        else:
            W = g.mT @ self.inputs.flatten(0, 1)
        return (W.mT if self.transposed else W).flatten(1), g.sum(1)

    def pairwise_is_cheaper(self) -> bool:
        """Compare, per pair of examples, multiplications in a Gram matrix of contracted gradients and of positions.

        Contracted: C² d_in d_out. Position by position: T² (d_in + C² d_out), and no product for indices; then T² C²
        numbers are multiplied and summed one by one, each as slow as many multiplications within a matrix product.
        """
        C, T, d_out = self.G.shape[1:]
        if self.A is None:
            return False
        inputs = 1 if self.has_indices else self.d_in
        return T * T * (inputs + C * C * (d_out + _ONE_BY_ONE)) < C * C * self.d_in * d_out


def concatenate_positions(uses: list["Factor"]) -> Outer | None:
    """Return the factor of a parameter used several times: each use is one more set of positions; None if unlike."""
    factors = [use for use in uses if isinstance(use, Outer)]
    if len(factors) < len(uses):
        return None
    first = factors[0]
    if len(factors) == 1:
        return first
    alike = {(f.A is None, f.has_indices, f.transposed, f.shared) for f in factors}
    if len(alike) > 1 or first.shared:
        return None
    A = None if first.A is None else torch.cat([f.A for f in factors if f.A is not None], dim=1)
    return replace(first, G=torch.cat([f.G for f in factors], dim=2), A=A)


_ONE_BY_ONE = 200  # multiplications of a matrix product in the time of one that waits for memory

Factor = Dense | Outer
