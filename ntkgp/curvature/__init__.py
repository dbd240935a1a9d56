"""Jᵀ Λ J in several structures, from the same captured layers as the kernel."""

from ntkgp.curvature.diagonal import diagonal_ggn
from ntkgp.curvature.full import full_ggn
from ntkgp.curvature.kronecker import KroneckerFactors

__all__ = ["KroneckerFactors", "diagonal_ggn", "full_ggn"]
