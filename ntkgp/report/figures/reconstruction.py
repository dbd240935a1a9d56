"""Figures of a reconstruction: the image with its error bars, whether they are calibrated, and how it converged.

Each function returns a figure of several panels that belongs to no window; single panels are in ``pixels``.
"""

import math
from typing import Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ntkgp.inverse import Reconstruction
from ntkgp.report.figures.axes import AFTER, axes_or_new
from ntkgp.report.figures.pixels import error_against_std, error_quantiles, image_size, loss_curve, pixel_image, plane
from ntkgp.report.metrics import psnr

__all__ = ["calibration_figure", "convergence_figure", "reconstruction_figure"]

_PANEL = 1.9  # inches a side
_TUNED = {  # what a step of tuning may log, and how it is called on an axis
    "log_evidence": "log evidence",
    "effective_parameters": "effective parameters γ",
    "noise": "noise variance σ²",
}


def reconstruction_figure(
    rec: Reconstruction, truth: Tensor | None = None, fbp: Tensor | None = None, samples: Tensor | None = None
) -> Figure:
    """Draw the mean and samples beside the truth and the filtered back-projection, and where they may be wrong.

    All images share the grey scale of the truth, or of the mean if there is none; what lies beyond is black or white.
    |error| and standard deviation share a colour scale, which only the largest hundredth of errors may exceed.

    Args:
        rec: of images with one channel.
        truth: the true image, (..., H, W).
        fbp: the filtered back-projection, (..., H, W).
        samples: of which two or three are drawn, (S, ..., H, W); by default some of a fixed seed.

    Raises:
        ValueError: if an image has another shape than those of ``rec``.
    """
    size = image_size(rec)
    grey = {"truth": truth, "filtered back-projection": fbp, "mean": rec.mean}
    images = {name: plane(name, x, size) for name, x in grey.items() if x is not None}
    if samples is None:
        samples = rec.sample(3, torch.Generator().manual_seed(0))
    shown = samples[: 3 if len(images) % 2 else 2]  # two full rows
    images |= {f"sample {i + 1}": plane("samples", x, size) for i, x in enumerate(shown)}
    errors = {"standard deviation": plane("std", rec.std, size)}
    if truth is not None:
        errors = {"|error|": (images["mean"] - images["truth"]).abs()} | errors

    columns = math.ceil(len(images) / 2)
    figure = Figure(figsize=(_PANEL * (columns + 1) + 1.6, 2 * _PANEL + 0.7), layout="constrained")
    grid = figure.add_gridspec(2, columns + 1)
    reference = images["mean" if truth is None else "truth"]
    left = [figure.add_subplot(grid[divmod(i, columns)]) for i in range(len(images))]
    _show(figure, left, images, "gray", (reference.min().item(), reference.max().item()), extend="both")
    right = [figure.add_subplot(grid[i, -1] if len(errors) == 2 else grid[:, -1]) for i in range(len(errors))]
    high = max(errors["standard deviation"].max().item(), *(x.quantile(0.99).item() for x in errors.values()))
    _show(figure, right, errors, "magma", (0.0, high), extend="max" if len(errors) == 2 else "neither")
    if truth is not None:
        for ax, (name, x) in zip(left, images.items(), strict=True):
            if name in ("filtered back-projection", "mean"):
                ax.set_xlabel(f"PSNR {psnr(x, images['truth']):.1f} dB", fontsize="small")
    return figure


def calibration_figure(rec: Reconstruction, truth: Tensor) -> Figure:
    """Draw :func:`error_against_std` and :func:`error_quantiles` side by side.

    Args:
        rec: of images with one channel.
        truth: the true image, (..., H, W).

    Raises:
        ValueError: if the truth has another shape than the images of ``rec``.
    """
    figure = Figure(figsize=(7.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    error_against_std(rec, truth, left)
    error_quantiles(rec, truth, right)
    return figure


def convergence_figure(rec: Reconstruction) -> Figure:
    """Draw the loss of the deep image prior by step, and what tuning logged: log evidence or γ, and the noise."""
    history = rec.posterior.history
    logged = [key for key in _TUNED if history and all(key in found for found in history)]
    figure = Figure(figsize=(0.4 + 3.6 * (1 + len(logged)), 3.2), layout="constrained")
    loss, *others = np.atleast_1d(figure.subplots(1, 1 + len(logged)))
    loss_curve(rec.dip, loss)
    for ax, key in zip(others, logged, strict=True):
        axes_or_new(ax).plot([np.sum(found[key]) for found in history], ".-", color=AFTER, linewidth=0.9)
        ax.set(title=_TUNED[key], xlabel="step of tuning")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if any(rec.posterior.named_priors()) and logged[:1] == ["log_evidence"]:
        others[0].set_title("log evidence + log hyperprior")
    return figure


def _show(
    figure: Figure,
    axes: list[Axes],
    images: dict[str, Tensor],
    colours: str,
    limits: tuple[float, float],
    extend: Literal["neither", "both", "max"],
) -> None:
    """Draw images on one colour scale, with one bar for all."""
    for ax, (name, x) in zip(axes, images.items(), strict=True):
        pixel_image(x, ax, name, colours, limits)
    shrink = 0.45 if len(axes) == 1 else 1.0  # to the height of the panel, or of two
    figure.colorbar(axes[0].images[0], ax=axes, extend=extend, fraction=0.08, aspect=30 * shrink, shrink=shrink)
