"""Linear systems that are only known by their products."""

from ntkgp.solvers.cg import Solution, conjugate_gradients

__all__ = ["Solution", "conjugate_gradients"]
