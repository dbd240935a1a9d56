"""Objectives over hyperparameters, and their optimisers."""

from ntkgp.evidence.ascent import Step, maximise
from ntkgp.evidence.mackay import derivative_in_logarithm, precision_step

__all__ = ["Step", "derivative_in_logarithm", "maximise", "precision_step"]
