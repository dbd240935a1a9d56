"""Objectives over hyperparameters, and their optimisers."""

from ntkgp.evidence.ascent import Step, maximise

__all__ = ["Step", "maximise"]
