"""Linear systems too large to factorise."""

from ntkgp.solvers.cg import Product, Solution, conjugate_gradients
from ntkgp.solvers.descent import Momentum, Rows, gradient_descent, largest_eigenvalue
from ntkgp.solvers.dual import dual_descent
from ntkgp.solvers.nystrom import Nystrom
from ntkgp.solvers.ranks import ALONE, Ranks

__all__ = [
    "ALONE",
    "Momentum",
    "Nystrom",
    "Product",
    "Ranks",
    "Rows",
    "Solution",
    "conjugate_gradients",
    "dual_descent",
    "gradient_descent",
    "largest_eigenvalue",
]
