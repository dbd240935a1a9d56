"""Lazy matrices of the linear model: J, K = J S₀ Jᵀ, Jᵀ Λ J."""

from ntkgp.operators.dense import gram, point_blocks
from ntkgp.operators.engines import ENGINES
from ntkgp.operators.ggn import GGNLinearOperator
from ntkgp.operators.jacobian import JacobianLinearOperator
from ntkgp.operators.plan import Plan, make_plan
from ntkgp.operators.rows import RowForm
from ntkgp.operators.tangent import TangentKernelLinearOperator

__all__ = [
    "ENGINES",
    "GGNLinearOperator",
    "JacobianLinearOperator",
    "Plan",
    "RowForm",
    "TangentKernelLinearOperator",
    "gram",
    "make_plan",
    "point_blocks",
]
