"""Scores: of probabilities against labels, of intervals, of what tells two data sets apart, and of images."""

import torch
from torch import Tensor

from ntkgp.posteriors import Prediction

__all__ = [
    "accuracy",
    "brier",
    "expected_calibration_error",
    "interval_coverage",
    "maximum_calibration_error",
    "negative_log_likelihood",
    "ood_auc",
    "psnr",
    "reliability",
    "root_mean_squared_calibration_error",
]


def negative_log_likelihood(prediction: Prediction, y: Tensor) -> float:
    """Return the mean of −log p(y), in nats a point."""
    return -prediction.log_prob(y).mean().item()


def accuracy(probs: Tensor, y: Tensor) -> float:  # (N, K), (N,)
    """Return the share of points whose most probable class is right."""
    probs, y = _checked(probs, y)
    return (probs.argmax(1) == y).double().mean().item()


def brier(probs: Tensor, y: Tensor) -> float:  # (N, K), (N,)
    """Return the mean of ‖p − one-hot(y)‖², summed over classes (0 to 2)."""
    probs, y = _checked(probs, y)
    return (probs - torch.nn.functional.one_hot(y, probs.shape[1])).square().sum(1).mean().item()


def reliability(
    probs: Tensor, y: Tensor, bins: int = 15, adaptive: bool = False
) -> tuple[Tensor, Tensor, Tensor]:  # (N, K), (N,) -> three times (bins,)
    """Return, bin by bin of the top probability, its mean, the accuracy, and the share of points.

    Args:
        probs: class probabilities.
        y: classes.
        bins: how many.
        adaptive: whether bins hold equally many points, instead of being equally wide.
    """
    probs, y = _checked(probs, y)
    confidence, guess = probs.max(1)
    correct = (guess == y).double()
    if adaptive:
        order = confidence.argsort()
        index = torch.empty_like(order)
        index[order] = torch.arange(len(order)) * bins // len(order)
    else:
        index = (confidence * bins).ceil().long().sub(1).clamp(0, bins - 1)  # bins (a, b]: 1 belongs to the last
    count = torch.bincount(index, minlength=bins).double()
    safe = count.clamp(min=1)
    mean = torch.zeros(bins, dtype=torch.float64).index_add(0, index, confidence) / safe
    hits = torch.zeros(bins, dtype=torch.float64).index_add(0, index, correct) / safe
    return mean, hits, count / len(y)


def expected_calibration_error(probs: Tensor, y: Tensor, bins: int = 15, adaptive: bool = False) -> float:
    """Return the mean distance of confidence and accuracy over bins, weighted by their points (Guo et al. 2017)."""
    mean, hits, share = reliability(probs, y, bins, adaptive)
    return (share * (mean - hits).abs()).sum().item()


def maximum_calibration_error(probs: Tensor, y: Tensor, bins: int = 15) -> float:
    """Return the largest distance of confidence and accuracy over bins with points in them."""
    mean, hits, share = reliability(probs, y, bins)
    return (mean - hits).abs()[share > 0].max().item()


def root_mean_squared_calibration_error(probs: Tensor, y: Tensor, bins: int = 15) -> float:
    """Return the root of the mean squared distance of confidence and accuracy, over bins with equally many points."""
    mean, hits, share = reliability(probs, y, bins, adaptive=True)
    return (share * (mean - hits).square()).sum().sqrt().item()


def ood_auc(inside: Tensor, outside: Tensor) -> float:  # (N,), (M,)
    """Return how probable it is that a score is larger outside than inside the distribution, ties counted half."""
    from sklearn.metrics import roc_auc_score  # two seconds, which `import ntkgp` must not take

    for name, scores in (("inside", inside), ("outside", outside)):
        if scores.ndim != 1 or not len(scores):
            raise ValueError(f"{name} must be a vector of scores, but has shape {tuple(scores.shape)}")
    labels = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))])
    return float(roc_auc_score(labels.numpy(), torch.cat([inside, outside]).double().cpu().numpy()))


def interval_coverage(prediction: Prediction, y: Tensor, level: float = 0.95) -> float:
    """Return the share of targets inside the central Gaussian interval of this level."""
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, but is {level}")
    z = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor((1 + level) / 2)).item()
    mean, std = prediction.mean, prediction.variance.sqrt()
    return ((y.reshape(mean.shape) - mean).abs() <= z * std).double().mean().item()


def psnr(x: Tensor, truth: Tensor) -> float:  # of one shape
    """Return the peak signal-to-noise ratio of an image, 10 log₁₀(max(truth)² / mean squared error), in decibels."""
    if x.shape != truth.shape:
        raise ValueError(f"x must have the truth's shape {tuple(truth.shape)}, but has {tuple(x.shape)}")
    x, truth = x.detach().double(), truth.detach().double()
    return (10 * torch.log10(truth.max() ** 2 / (x - truth).square().mean())).item()


def _checked(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # (N, K), (N,)
    if probs.ndim != 2 or probs.shape[1] < 2:
        raise ValueError(f"probs must have shape (N, K) with K at least 2, but has {tuple(probs.shape)}")
    y = y.reshape(-1).cpu()
    if len(y) != len(probs) or not len(y):
        raise ValueError(f"y must hold a class for each of {len(probs)} points, but has {len(y)}")
    if y.is_floating_point():
        raise TypeError(f"y must hold integer class indices, but has dtype {y.dtype}")
    return probs.detach().double().cpu(), y.long()
