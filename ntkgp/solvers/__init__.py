"""Linear systems too large to factorise."""

from ntkgp.solvers.cg import Product, Solution, conjugate_gradients
from ntkgp.solvers.nystrom import Nystrom
from ntkgp.solvers.ranks import ALONE, Ranks

__all__ = ["ALONE", "Nystrom", "Product", "Ranks", "Solution", "conjugate_gradients"]
