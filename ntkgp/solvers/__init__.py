"""Linear systems too large to factorise."""

from ntkgp.solvers.cg import Product, Solution, conjugate_gradients
from ntkgp.solvers.nystrom import Nystrom

__all__ = ["Nystrom", "Product", "Solution", "conjugate_gradients"]
