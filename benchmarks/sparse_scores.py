"""Scores of class probabilities that are compared point by point."""

import torch
from torch import Tensor

from ntkgp.report import metrics

__all__ = ["LINKS", "POINTWISE", "TEMPERATURES", "calibration_gap", "paired", "scored"]

TEMPERATURES = torch.logspace(-0.5, 0.7, 121)
LINKS = "mc", "probit"  # from latent moments to probabilities
POINTWISE = "log_prob", "confidence", "hit"  # scores that are kept point by point, for differences
BINS, RESAMPLED = 15, 1000


def scored(p: Tensor, y: Tensor) -> dict:
    """Return NLL, ECE and accuracy, and what paired differences need."""
    log_prob = p[torch.arange(len(y)), y].clamp(min=1e-12).log()
    ece = metrics.expected_calibration_error(p, y)
    return {
        "nll": -log_prob.mean().item(),
        "ece": ece,
        "accuracy": metrics.accuracy(p, y),
        "log_prob": log_prob.tolist(),
        "confidence": p.amax(-1).tolist(),
        "hit": (p.argmax(-1) == y).tolist(),
    }


def paired(one: dict, other: dict) -> list[float]:
    """Return by how much the NLL of the first is lower, and the standard error."""
    gap = torch.tensor(one["log_prob"]).double() - torch.tensor(other["log_prob"]).double()
    return [gap.mean().item(), (gap.std() / len(gap) ** 0.5).item()]


def calibration_gap(one: dict, other: dict) -> list[float]:
    """Return by how much the ECE of the first is lower, and its standard error by resampling points for both alike."""
    generator, n = torch.Generator().manual_seed(0), len(one["hit"])
    draws = torch.randint(n, (RESAMPLED, n), generator=generator)

    def errors(run: dict) -> Tensor:  # (RESAMPLED + 1,), all points first
        confidence = torch.tensor(run["confidence"]).double()
        gap = confidence - torch.tensor(run["hit"]).double()
        bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
        index = torch.cat([torch.arange(n).unsqueeze(0), draws])
        sums = torch.zeros(len(index), BINS, dtype=torch.float64).scatter_add_(1, bins[index], gap[index])
        return sums.abs().sum(1) / n

    gap = errors(other) - errors(one)
    return [gap[0].item(), gap[1:].std().item()]
