"""Network -> f, J v, Jᵀ u, and the Jacobian in factored form. Knows torch, nothing of Gaussian processes."""

from ntkgp.linearization.features import Block, DenseBlock, Features
from ntkgp.linearization.linearization import Linearization

__all__ = ["Block", "DenseBlock", "Features", "Linearization"]
