"""Ways to a dense Gram matrix: layer by layer, by dense Jacobians, or by products with the network."""

from collections.abc import Callable

import torch
from torch import Tensor

from ntkgp.linearization import Linearization
from ntkgp.linearization.inputs import Input, batch_size, take
from ntkgp.linearization.memory import empty
from ntkgp.operators.dense import gram
from ntkgp.priors import PriorCovariance

__all__ = ["ENGINES"]

Engine = Callable[[Linearization, Input, Input | None, PriorCovariance, int, Tensor | None], Tensor]


def layerwise(
    lin: Linearization,
    x1: Input,
    x2: Input | None,
    S0: PriorCovariance,
    memory_budget: int,
    out: Tensor | None = None,
) -> Tensor:
    """Return K from factored features, in tiles of points if those of all do not fit the budget."""
    n, m = batch_size(x1), 0 if x2 is None else batch_size(x2)
    fits = max(2, memory_budget * 2 // lin.pilot().nbytes)  # the pilot has two examples
    if n + m <= fits:
        return gram(lin.features(x1), None if x2 is None else lin.features(x2), S0.covariances, out)
    C, tile = lin.num_outputs, max(1, fits // 2)
    K = empty((n * C, (m or n) * C), lin.pilot().like) if out is None else out
    for i in range(0, n, tile):
        F1 = lin.features(take(x1, slice(i, i + tile)))
        rows = slice(i * C, (i + F1.num_examples) * C)
        if x2 is None:
            gram(F1, None, S0.covariances, out=K[rows, rows])
        for j in range(0, i if x2 is None else m, tile):
            F2 = lin.features(take(x1 if x2 is None else x2, slice(j, j + tile)))
            cols = slice(j * C, (j + F2.num_examples) * C)
            gram(F1, F2, S0.covariances, out=K[rows, cols])
            if x2 is None:
                K[cols, rows] = K[rows, cols].mT
    return K


def by_jacobian(
    lin: Linearization,
    x1: Input,
    x2: Input | None,
    S0: PriorCovariance,
    memory_budget: int,
    out: Tensor | None = None,
) -> Tensor:
    """Return K as a product of dense Jacobians."""
    J1 = lin.features(x1).jacobian(lin.layout).flatten(0, 1)
    J2 = J1 if x2 is None else lin.features(x2).jacobian(lin.layout).flatten(0, 1)
    return torch.mm(J1, S0._matmul(J2.mT), out=out)


def by_products(
    lin: Linearization,
    x1: Input,
    x2: Input | None,
    S0: PriorCovariance,
    memory_budget: int,
    out: Tensor | None = None,
) -> Tensor:
    """Return K column by column: pull the outputs of one point back to weights, and push them to all points."""
    columns = x1 if x2 is None else x2
    parts = []
    for i in range(batch_size(columns)):
        V = S0._matmul(lin.jacobian(take(columns, slice(i, i + 1)))[0].mT).mT  # (C, P)
        parts.append(lin.jvp(x1, V).flatten(1).mT)
    return torch.cat(parts, dim=1, out=out)


ENGINES: dict[str, Engine] = {"layerwise": layerwise, "jacobian": by_jacobian, "products": by_products}
