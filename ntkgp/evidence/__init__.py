"""Objectives over hyperparameters, and their optimisers."""

from ntkgp.evidence.ascent import Step, maximise
from ntkgp.evidence.lanczos import Estimate, log_det_estimate
from ntkgp.evidence.mackay import derivative_in_logarithm, noise_step, precision_step

__all__ = [
    "Estimate",
    "Step",
    "derivative_in_logarithm",
    "log_det_estimate",
    "maximise",
    "noise_step",
    "precision_step",
]
