"""The diagonal of Jᵀ Λ J, exactly."""

from collections.abc import Callable

import torch
from torch import Tensor

from ntkgp.linearization import Features

__all__ = ["diagonal_ggn"]


def diagonal_ggn(F: Features, weigh: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:  # {name: (p,)}
    r"""Return Σ_n diag(J_nᵀ Λ_n J_n) by parameter.

    Where J = g ⊗ a with one position, the squares factorise: :math:`\sum_k (R^\top g)_k^2 \otimes a^2`.

    Args:
        F: the factored Jacobian.
        weigh: turns (N, C, p), rows of J or of its cotangents, into Rᵀ times them.
    """
    found: dict[str, Tensor] = {}
    for dense in F.dense:
        squares = weigh(dense.J).square().sum((0, 1))
        found |= {name: squares[columns] for name, columns in dense.columns.items()}
    for block in F.blocks:
        outer, n = block.outer, F.num_examples
        if outer.positions > 1 or outer.has_indices:
            found[block.weight] = weigh(outer.dense().expand(n, -1, -1)).square().sum((0, 1))
            g = weigh(outer.G.sum(-2).expand(n, -1, -1)).square().sum(1)
        else:
            g = weigh(outer.G[:, :, 0].expand(n, -1, -1)).square().sum(1)  # (N, d_out)
            squares = torch.einsum("no,ni->oi", g, outer.inputs[:, 0].square())
            found[block.weight] = (squares.mT if outer.transposed else squares).flatten()
        if block.bias is not None:
            found[block.bias] = g.sum(0)
    return found
