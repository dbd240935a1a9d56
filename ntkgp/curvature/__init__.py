"""Jᵀ Λ J in several structures, from the captured layers of the kernel or pulled back layer by layer."""

from ntkgp.curvature.diagonal import diagonal_ggn
from ntkgp.curvature.full import full_ggn
from ntkgp.curvature.hutchinson import DiagonalEstimate, hutchinson_diagonal
from ntkgp.curvature.kronecker import KroneckerFactors
from ntkgp.curvature.layerwise import LayerwiseCurvature
from ntkgp.curvature.squares import RULES, Rule, bilinear, by_jacobian, elementwise, routed
from ntkgp.curvature.tape import Call

__all__ = [
    "RULES",
    "Call",
    "DiagonalEstimate",
    "KroneckerFactors",
    "LayerwiseCurvature",
    "Rule",
    "bilinear",
    "by_jacobian",
    "diagonal_ggn",
    "elementwise",
    "full_ggn",
    "hutchinson_diagonal",
    "routed",
]
