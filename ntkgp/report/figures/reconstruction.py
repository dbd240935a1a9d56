"""Figures of a reconstruction: the image with its error bars, whether they are calibrated, and how it converged.

Each function returns a figure of several panels that belongs to no window.
"""

import math
from typing import Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ntkgp.inverse import Reconstruction
from ntkgp.report.metrics import psnr

__all__ = ["calibration_figure", "convergence_figure", "reconstruction_figure"]

_PANEL = 1.9  # inches a side
_BINS = 10
_LIMIT = 10  # standard deviations; pixels that the network is sure of may be thousands away
_POINT, _GUIDE = "tab:blue", "0.6"
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
    grey = {"truth": truth, "filtered back-projection": fbp, "mean": rec.mean}
    images = {name: _plane(rec, name, x) for name, x in grey.items() if x is not None}
    if samples is None:
        samples = rec.sample(3, torch.Generator().manual_seed(0))
    shown = samples[: 3 if len(images) % 2 else 2]  # two full rows
    images |= {f"sample {i + 1}": _plane(rec, "samples", x) for i, x in enumerate(shown)}
    errors = {"standard deviation": _plane(rec, "std", rec.std)}
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
    r"""Draw |error| against the standard deviation, and quantiles of (x − mean) / std against those of a Gaussian.

    Left, pixels are sorted by their standard deviation into ten bins of equally many, with the standard error of each
    mean, as if pixels were independent. A calibrated Gaussian has a mean |error| of :math:`\sqrt{2/\pi}` std.

    Args:
        rec: of images with one channel.
        truth: the true image, (..., H, W).

    Raises:
        ValueError: if the truth has another shape than the images of ``rec``.
    """
    mean, std = (_plane(rec, name, x).flatten() for name, x in (("mean", rec.mean), ("std", rec.std)))
    left = _plane(rec, "truth", truth).flatten() - mean
    figure = Figure(figsize=(7.6, 3.6), layout="constrained")
    binned, quantiles = figure.subplots(1, 2)

    order = std.argsort().tensor_split(_BINS)
    rows = [(std[i].mean(), left[i].abs().mean(), left[i].abs().std() / len(i) ** 0.5) for i in order if len(i) > 1]
    x, y, error = torch.tensor(rows, dtype=torch.float64).mT.numpy()
    binned.axline((0, 0), slope=math.sqrt(2 / math.pi), color=_GUIDE, linewidth=0.8, label="calibrated Gaussian")
    binned.errorbar(x, y, error, fmt="o", color=_POINT, markersize=4, label="a tenth of the pixels")
    binned.set(xlabel="standard deviation", ylabel="mean |error|", title="error against standard deviation")
    binned.legend(frameon=False, fontsize="small")

    z = (left / std).sort().values
    normal = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(len(z), dtype=z.dtype) + 0.5) / len(z))
    quantiles.axline((0, 0), slope=1, color=_GUIDE, linewidth=0.8)
    quantiles.plot(normal.numpy(), z.numpy(), ".", color=_POINT, markersize=4)
    quantiles.set(xlabel="quantile of a Gaussian", ylabel="quantile of (x − mean) / std")
    quantiles.set(title=f"{(z.abs() <= 2).double().mean():.0%} of pixels within two std")
    if beyond := int((z.abs() > _LIMIT).sum()):
        quantiles.set_ylim(-_LIMIT, _LIMIT)
        quantiles.text(0.02, 0.98, f"{beyond} beyond ±{_LIMIT}", transform=quantiles.transAxes, va="top")
    for ax in (binned, quantiles):
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def convergence_figure(rec: Reconstruction) -> Figure:
    """Draw the loss of the deep image prior by step, and what tuning logged: log evidence or γ, and the noise."""
    history = rec.posterior.history
    logged = [key for key in _TUNED if history and all(key in found for found in history)]
    figure = Figure(figsize=(0.4 + 3.6 * (1 + len(logged)), 3.2), layout="constrained")
    loss, *others = np.atleast_1d(figure.subplots(1, 1 + len(logged)))
    loss.semilogy(rec.dip.losses, color=_POINT, linewidth=0.9)
    loss.plot(
        rec.dip.step, rec.dip.losses[rec.dip.step], "o", color="black", markersize=4, label="weights that are kept"
    )
    loss.set(title="deep image prior", xlabel="step of training", ylabel="loss")
    loss.legend(frameon=False, fontsize="small")
    for ax, key in zip(others, logged, strict=True):
        ax.plot([np.sum(found[key]) for found in history], ".-", color=_POINT, linewidth=0.9)
        ax.set(title=_TUNED[key], xlabel="step of tuning")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if any(rec.posterior.named_priors()) and logged[:1] == ["log_evidence"]:
        others[0].set_title("log evidence + log hyperprior")
    for ax in (loss, *others):
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def _plane(rec: Reconstruction, name: str, x: Tensor) -> Tensor:  # (..., H, W) -> (H, W)
    """Return one image in double precision."""
    size = rec.shape[-2:]
    if len(rec.shape) != 3 or rec.shape[0] != 1:
        raise ValueError(f"rec must be of images with the shape (1, H, W), but they have {tuple(rec.shape)}")
    if x.shape[-2:] != size or x.numel() != size.numel():
        raise ValueError(f"{name} must be one image of shape {tuple(size)}, but has {tuple(x.shape)}")
    return x.detach().double().cpu().reshape(size)


def _show(
    figure: Figure,
    axes: list[Axes],
    images: dict[str, Tensor],
    colours: str,
    limits: tuple[float, float],
    extend: Literal["neither", "both", "max"],
) -> None:
    """Draw images on one colour scale, with one bar for all."""
    norm = Normalize(*limits)
    for ax, (name, x) in zip(axes, images.items(), strict=True):
        ax.imshow(x.numpy(), cmap=colours, norm=norm)
        ax.set_title(name, fontsize="medium")
        ax.set(xticks=[], yticks=[])
    shrink = 0.45 if len(axes) == 1 else 1.0  # to the height of the panel, or of two
    figure.colorbar(axes[0].images[0], ax=axes, extend=extend, fraction=0.08, aspect=30 * shrink, shrink=shrink)
