"""The factored Jacobian of N examples: what a Gram matrix under any prior is made from."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ntkgp.linearization.factors import Factor, Outer, concatenate_positions
from ntkgp.linearization.layout import ParameterLayout

__all__ = ["Block", "Features"]


@dataclass(frozen=True)
class Block:
    """A weight whose Jacobian stays an outer product, with the bias that shares its cotangents."""

    weight: str
    bias: str | None
    outer: Outer

    def __getitem__(self, index: slice) -> "Block":
        """Return the examples that ``index`` selects."""
        return replace(self, outer=self.outer[index])


@dataclass(frozen=True)
class Features:
    """J(x) for N examples: outer-product blocks, and one dense matrix with the columns of all other parameters.

    Parameters the network does not use have no entry: their Jacobian is zero.
    """

    num_examples: int
    num_outputs: int
    blocks: tuple[Block, ...]
    J: Tensor  # (N, C, columns of the dense parameters)
    columns: dict[str, slice]

    def __getitem__(self, index: slice) -> "Features":
        """Return the examples that ``index`` selects; no copy."""
        n = len(range(*index.indices(self.num_examples)))
        return replace(self, num_examples=n, blocks=tuple(block[index] for block in self.blocks), J=self.J[index])

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor held."""
        yield self.J
        for block in self.blocks:
            yield block.outer.G
            if block.outer.A is not None:
                yield block.outer.A

    def jacobian(self, layout: ParameterLayout) -> Tensor:  # (N, C, P)
        """Return the dense Jacobian."""
        J = self.J.new_zeros(self.num_examples, self.num_outputs, layout.num_params)
        at = layout.slices
        for name, columns in self.columns.items():
            J[..., at[name]] = self.J[..., columns]
        for block in self.blocks:
            J[..., at[block.weight]] = block.outer.dense()
            if block.bias is not None:
                J[..., at[block.bias]] = replace(block.outer, A=None).dense()
        return J

    def vjp(self, u: Tensor) -> dict[str, Tensor]:  # (N, C) -> {name: (p,)}
        """Return Jᵀu by parameter, from the features alone."""
        out = {name: torch.einsum("nc,ncp->p", u, self.J[..., columns]) for name, columns in self.columns.items()}
        for block in self.blocks:
            outer = block.outer
            g = torch.einsum("nc,ncto->nto", u, outer.G.expand(self.num_examples, -1, -1, -1))
            pulled = replace(outer, G=g.unsqueeze(1), shared=False)
            out[block.weight] = pulled.dense().sum((0, 1))
            if block.bias is not None:
                out[block.bias] = g.sum((0, 1))
        return out

    def joined(self, J: Tensor, sizes: dict[str, int]) -> "Features":  # (N, C, sum of sizes)
        """Return these features with dense columns for more parameters."""
        columns, end = dict(self.columns), self.J.shape[-1]
        for name, size in sizes.items():
            columns[name] = slice(end, end := end + size)
        return replace(self, J=torch.cat([self.J, J], dim=-1), columns=columns)

    @classmethod
    def assemble(cls, n: int, c: int, factors: dict[str, list[tuple[int, Factor]]], like: Tensor) -> "Features":
        """Gather what each parameter got from each node: uses of one parameter are added, biases join their weights.

        Args:
            n: number of examples.
            c: number of outputs.
            factors: for each parameter, the node and the factor of every use.
            like: a tensor of the right dtype and device.
        """
        outers: dict[str, tuple[tuple[int, ...], Outer]] = {}
        dense: dict[str, Tensor] = {}
        for name, uses in factors.items():
            parts = [factor for _, factor in uses]
            merged = None
            if all(isinstance(part, Outer) for part in parts):
                merged = concatenate_positions([part for part in parts if isinstance(part, Outer)])
            if merged is not None:
                outers[name] = tuple(node for node, _ in uses), merged
            else:
                dense[name] = torch.stack([part.dense().expand(n, -1, -1) for part in parts]).sum(0)
        weights = {nodes: name for name, (nodes, outer) in outers.items() if _stays_factored(outer)}
        biases = {
            weights[nodes]: name for name, (nodes, outer) in outers.items() if outer.A is None and nodes in weights
        }
        blocks = tuple(Block(name, biases.get(name), outers[name][1]) for name in weights.values())
        kept = {*weights.values(), *biases.values()}
        dense |= {name: outer.dense().expand(n, -1, -1) for name, (_, outer) in outers.items() if name not in kept}
        dense = {name: dense[name] for name in factors if name in dense}
        empty = cls(n, c, blocks, like.new_zeros(n, c, 0), {})
        if not dense:
            return empty
        sizes = {name: part.shape[-1] for name, part in dense.items()}
        return empty.joined(torch.cat(list(dense.values()), dim=-1), sizes)

    @classmethod
    def cat(cls, parts: list["Features"]) -> "Features":
        """Concatenate over examples."""
        first = parts[0]
        if len(parts) == 1:
            return first
        blocks = tuple(
            replace(block, outer=_cat_examples([part.blocks[i].outer for part in parts]))
            for i, block in enumerate(first.blocks)
        )
        n = sum(part.num_examples for part in parts)
        return replace(first, num_examples=n, blocks=blocks, J=torch.cat([part.J for part in parts]))


def _stays_factored(outer: Outer) -> bool:
    return outer.A is not None and (outer.positions == 1 or outer.pairwise_is_cheaper())


def _cat_examples(outers: list[Outer]) -> Outer:
    first = outers[0]
    A = None if first.A is None else torch.cat([outer.A for outer in outers if outer.A is not None])
    return replace(first, G=first.G if first.shared else torch.cat([outer.G for outer in outers]), A=A)
