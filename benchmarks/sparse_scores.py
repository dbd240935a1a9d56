"""Scores of class probabilities that are compared point by point."""

import torch
from torch import Tensor

from ntkgp.report import metrics

__all__ = ["TEMPERATURES", "paired", "scored"]

TEMPERATURES = torch.logspace(-0.5, 0.7, 121)


def scored(p: Tensor, y: Tensor) -> dict:
    """Return NLL, ECE, accuracy, and log probabilities for paired differences."""
    log_prob = p[torch.arange(len(y)), y].clamp(min=1e-12).log()
    ece = metrics.expected_calibration_error(p, y)
    return {
        "nll": -log_prob.mean().item(),
        "ece": ece,
        "accuracy": metrics.accuracy(p, y),
        "log_prob": log_prob.tolist(),
    }


def paired(one: dict, other: dict) -> list[float]:
    """Return by how much the NLL of the first is lower, and the standard error."""
    gap = torch.tensor(one["log_prob"]).double() - torch.tensor(other["log_prob"]).double()
    return [gap.mean().item(), (gap.std() / len(gap) ** 0.5).item()]
