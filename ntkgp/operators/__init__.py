"""Lazy matrices of the linear model: J, K = J S₀ Jᵀ, Jᵀ Λ J."""

from ntkgp.operators.ggn import GGNLinearOperator
from ntkgp.operators.gram import gram, point_blocks
from ntkgp.operators.jacobian import JacobianLinearOperator
from ntkgp.operators.rows import RowForm
from ntkgp.operators.tangent import TangentKernelLinearOperator

__all__ = [
    "GGNLinearOperator",
    "JacobianLinearOperator",
    "RowForm",
    "TangentKernelLinearOperator",
    "gram",
    "point_blocks",
]
