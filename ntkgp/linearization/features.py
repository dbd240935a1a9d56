"""The factored Jacobian of N examples: what a Gram matrix under any prior is made from."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ntkgp.linearization.factors import Factor, Outer, concatenate_positions
from ntkgp.linearization.layout import ParameterLayout
from ntkgp.linearization.memory import empty

__all__ = ["Block", "DenseBlock", "Features"]


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
class DenseBlock:
    """The Jacobian of some parameters, column by column."""

    J: Tensor  # (N, C, p)
    columns: dict[str, slice]

    def __getitem__(self, index: slice) -> "DenseBlock":
        """Return the examples that ``index`` selects."""
        return replace(self, J=self.J[index])


@dataclass(frozen=True)
class Features:
    """J(x) for N examples: outer products where they are small, dense columns elsewhere.

    Every large parameter has a dense block of its own, so that it can be written in place; small ones share one.
    Parameters the network does not use have no entry: their Jacobian is zero.
    """

    num_examples: int
    num_outputs: int
    blocks: tuple[Block, ...]
    dense: tuple[DenseBlock, ...]

    def __getitem__(self, index: slice) -> "Features":
        """Return the examples that ``index`` selects; no copy."""
        n = len(range(*index.indices(self.num_examples)))
        return Features(n, self.num_outputs, tuple(b[index] for b in self.blocks), tuple(d[index] for d in self.dense))

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    @property
    def like(self) -> Tensor:
        """A tensor of the right dtype and device."""
        return next(t for t in self.tensors() if t.is_floating_point())

    @property
    def form(self) -> tuple:
        """Which parameters are held in which way."""
        return tuple((b.weight, b.bias) for b in self.blocks), tuple(tuple(d.columns) for d in self.dense)

    def contracted(self) -> "Features":
        """Return the same Jacobian as one dense block for each parameter, in alphabetical order."""
        parts = {name: d.J[..., columns] for d in self.dense for name, columns in d.columns.items()}
        for block in self.blocks:
            parts[block.weight] = block.outer.dense()
            if block.bias is not None:
                parts[block.bias] = replace(block.outer, A=None).dense()
        n = self.num_examples
        blocks = [
            DenseBlock(parts[name].expand(n, -1, -1), _columns({name: parts[name].shape[-1]})) for name in sorted(parts)
        ]
        return Features(n, self.num_outputs, (), tuple(blocks))

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor held."""
        for block in self.blocks:
            yield block.outer.G
            yield block.outer.inputs
        for dense in self.dense:
            yield dense.J

    def jacobian(self, layout: ParameterLayout) -> Tensor:  # (N, C, P)
        """Return the dense Jacobian."""
        J = self.like.new_zeros(self.num_examples, self.num_outputs, layout.num_params)
        at = layout.slices
        for dense in self.dense:
            for name, columns in dense.columns.items():
                J[..., at[name]] = dense.J[..., columns]
        for block in self.blocks:
            J[..., at[block.weight]] = block.outer.dense()
            if block.bias is not None:
                J[..., at[block.bias]] = replace(block.outer, A=None).dense()
        return J

    def vjp(self, u: Tensor) -> dict[str, Tensor]:  # (S, N, C) -> {name: (S, p)}
        """Return Jᵀu by parameter for S vectors, from the features alone."""
        out: dict[str, Tensor] = {}
        for dense in self.dense:
            pulled = u.flatten(1) @ dense.J.flatten(0, 1)
            out |= {name: pulled[:, columns] for name, columns in dense.columns.items()}
        for block in self.blocks:
            out[block.weight], b = block.outer.vjp(u)
            if block.bias is not None:
                out[block.bias] = b
        return out

    def weighted(self, weigh: Callable[[Tensor], Tensor]) -> "Features":
        """Return the features of other outputs, combinations of these at each example: J -> R_nᵀ J_n.

        Args:
            weigh: turns (N, C, p), any columns of J or of its cotangents, into (N, C', p).
        """

        def outer(old: Outer) -> Outer:
            G = old.G.expand(self.num_examples, -1, -1, -1)
            return replace(old, G=weigh(G.flatten(2)).unflatten(-1, G.shape[2:]), shared=False)

        blocks = tuple(replace(block, outer=outer(block.outer)) for block in self.blocks)
        dense = tuple(replace(block, J=weigh(block.J)) for block in self.dense)
        C = blocks[0].outer.G.shape[1] if blocks else dense[0].J.shape[1]
        return Features(self.num_examples, C, blocks, dense)

    def jvp(self, v: dict[str, Tensor]) -> Tensor:  # {name: (S, p)} -> (S, N, C)
        """Return J v for S vectors, from the features alone."""
        S = next(iter(v.values())).shape[0]
        out = self.like.new_zeros(S, self.num_examples, self.num_outputs)
        for dense in self.dense:
            stacked = torch.cat([v[name] for name in dense.columns], dim=1)
            out += (stacked @ dense.J.flatten(0, 1).mT).unflatten(1, out.shape[1:])
        for block in self.blocks:
            out += block.outer.jvp(v[block.weight], None if block.bias is None else v[block.bias])
        return out

    def allocate(self, n: int) -> "Features":
        """Return features like these with room for ``n`` examples."""
        blocks = tuple(replace(block, outer=block.outer.allocate(n)) for block in self.blocks)
        dense = tuple(replace(block, J=empty((n, *block.J.shape[1:]), block.J)) for block in self.dense)
        return Features(n, self.num_outputs, blocks, dense)

    def copy_(self, other: "Features") -> None:
        """Take over the numbers of ``other``, of the same form, except where they were written in place already."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            if mine.data_ptr() != theirs.data_ptr():
                mine.copy_(theirs)

    def joined(self, J: Tensor, sizes: dict[str, int]) -> "Features":  # (N, C, sum of sizes)
        """Return these features with a dense block for more parameters."""
        return replace(self, dense=(*self.dense, DenseBlock(J, _columns(sizes))))

    @classmethod
    def assemble(
        cls, n: int, c: int, factors: dict[str, list[tuple[int, Factor]]], into: "Features | None" = None
    ) -> "Features":
        """Gather what each parameter got from each node: uses of one parameter are added, biases join their weights.

        Args:
            n: number of examples.
            c: number of outputs.
            factors: for each parameter, the node and the factor of every use.
            into: where to write the Jacobians of large parameters, if they are to be part of something larger.
        """
        outers: dict[str, tuple[tuple[int, ...], Outer]] = {}
        dense: dict[str, Tensor] = {}
        for name, uses in factors.items():
            parts = [factor for _, factor in uses]
            merged = concatenate_positions(parts)
            if merged is not None:
                outers[name] = tuple(node for node, _ in uses), merged
            else:
                dense[name] = torch.stack([part.dense() for part in parts]).sum(0) if parts[1:] else parts[0].dense()
        weights = {nodes: name for name, (nodes, outer) in outers.items() if _stays_factored(outer)}
        biases = {
            weights[nodes]: name
            for name, (nodes, outer) in outers.items()
            if outer.A is None and nodes in weights and outer.G.shape == outers[weights[nodes]][1].G.shape
        }  # a transposed convolution's weight has cotangents of its own
        blocks = tuple(Block(name, biases.get(name), outers[name][1]) for name in weights.values())
        kept = {*weights.values(), *biases.values()}
        places = {} if into is None else {name: d.J for d in into.dense for name in d.columns if len(d.columns) == 1}
        for name, (_, outer) in outers.items():
            if name not in kept:
                dense[name] = outer.dense(out=places.get(name)).expand(n, -1, -1)
        large = [name for name in factors if name in dense and dense[name].shape[-1] >= _LARGE]
        small = {name: dense[name] for name in factors if name in dense and name not in large}
        own = [DenseBlock(dense[name], _columns({name: dense[name].shape[-1]})) for name in large]
        if small:
            J = torch.cat([part.expand(n, -1, -1) for part in small.values()], dim=-1)
            own.append(DenseBlock(J, _columns({name: part.shape[-1] for name, part in small.items()})))
        return cls(n, c, blocks, tuple(own))


_LARGE = 1024  # numbers from which a parameter has a block of its own


def _columns(sizes: dict[str, int]) -> dict[str, slice]:
    columns, end = {}, 0
    for name, size in sizes.items():
        columns[name] = slice(end, end := end + size)
    return columns


def _stays_factored(outer: Outer) -> bool:
    return outer.A is not None and (outer.positions == 1 or outer.pairwise_is_cheaper())
