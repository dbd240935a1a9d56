r"""The diagonal of Jᵀ Λ J from random probes: one backward pass each, for any network."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ntkgp.curvature.layerwise import OutputRoot
from ntkgp.linearization import Linearization
from ntkgp.linearization.inputs import Input

__all__ = ["DiagonalEstimate", "hutchinson_diagonal"]

_TOGETHER = 16  # probes that are pulled back together


@dataclass(frozen=True)
class DiagonalEstimate:
    """An unbiased estimate by parameter, with standard errors."""

    mean: dict[str, Tensor]  # {name: (p,)}
    standard_error: dict[str, Tensor]  # {name: (p,)}


def hutchinson_diagonal(
    lin: Linearization,
    x: Input,
    root: Callable[[Tensor], OutputRoot],
    num_probes: int = 64,
    generator: torch.Generator | None = None,
) -> DiagonalEstimate:
    r"""Return the mean of :math:`(\sum_n J_n^\top R_n \epsilon_n)^2` over probes ε of independent signs.

    Its expectation is the diagonal of :math:`\sum_n J_n^\top \Lambda_n J_n`: as the probe is pulled back from the
    outputs, its square is the entry itself, and no estimate is negative (Hutchinson 1989 for traces; Bekas et al. 2007
    for diagonals).

    Args:
        lin: the linearised network.
        x: a batch of examples.
        root: what turns outputs f, (N, C), into R with R Rᵀ = Λ, as ``lambda f: likelihood.expand(y, f).R``.
        num_probes: backward passes, at least two for standard errors.
        generator: of the signs; by default seed 0.

    Raises:
        ValueError: if ``num_probes`` is less than two.
    """
    if num_probes < 2:
        raise ValueError(f"num_probes must be at least 2, but is {num_probes}")
    generator = generator or torch.Generator(lin.device).manual_seed(0)
    with torch.no_grad():
        R = root(lin(x))
        N, T, _, columns = R.values.shape
        mean, spread = torch.zeros_like(lin.theta), torch.zeros_like(lin.theta)
        for start in range(0, num_probes, _TOGETHER):
            S = min(_TOGETHER, num_probes - start)
            signs = torch.randint(2, (S, N, T, columns, 1), generator=generator, device=lin.device)
            u = (R.values @ (2 * signs - 1).to(R.values)).squeeze(-1).mT.flatten(-2)  # (S, N, C)
            squares = lin.vjp(x, u).square()
            moved = squares.mean(0) - mean  # means and sums of squared deviations of both parts, joined
            spread += (squares - squares.mean(0)).square().sum(0) + moved.square() * start * S / (start + S)
            mean += moved * S / (start + S)
        error = (spread / (num_probes - 1) / num_probes).sqrt()
    layout = lin.layout
    return DiagonalEstimate(*({name: t.flatten() for name, t in layout.split(v).items()} for v in (mean, error)))
