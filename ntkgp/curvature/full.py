"""Jᵀ Λ J as a dense matrix."""

from collections.abc import Callable

from torch import Tensor

from ntkgp.linearization import Features
from ntkgp.linearization.layout import ParameterLayout
from ntkgp.operators.symmetric import add_square, has_square, mirror

__all__ = ["full_ggn"]

_BYTES = 256 << 20  # of dense Jacobians at a time


def full_ggn(
    F: Features, weigh: Callable[[Tensor, slice], Tensor], layout: ParameterLayout, out: Tensor
) -> Tensor:  # (P, P)
    """Add Σ_n J_nᵀ Λ_n J_n of these examples to ``out``, symmetric itself: ½ N C P² multiplications.

    Args:
        F: the factored Jacobian.
        weigh: turns rows (n, C, P) of J, those of the examples in a slice, into Rᵀ J.
        layout: order of the parameters.
        out: what to add to.
    """
    each = F.num_outputs * layout.num_params * out.element_size()
    step = max(1, _BYTES // each)
    for start in range(0, F.num_examples, step):
        some = slice(start, start + step)
        J = weigh(F[some].jacobian(layout), some).flatten(0, 1)
        if has_square(J.mT, out):
            add_square(out, J.mT, alpha=1.0, fresh=False)
        else:
            out.addmm_(J.mT, J)
    mirror(out)
    return out
