"""One panel each: an image, its errors against their standard deviations, their quantiles, and losses in training."""

import math

import torch
from matplotlib.axes import Axes
from torch import Tensor

from ntkgp.inverse import DeepImagePrior, Reconstruction
from ntkgp.report.figures.axes import AFTER, GUIDE, axes_or_new

__all__ = ["error_against_std", "error_quantiles", "loss_curve", "pixel_image"]

_BINS = 10
_LIMIT = 10  # standard deviations; pixels that the network is sure of may be thousands away


def pixel_image(
    image: Tensor, ax: Axes | None = None, title: str = "", colours: str = "gray", limits: tuple[float, float] = (0, 1)
) -> Axes:
    """Draw one image.

    Args:
        image: (..., H, W), of one channel.
        ax: where to draw.
        title: over it.
        colours: a colour map of matplotlib's.
        limits: values of the first and of the last colour.

    Raises:
        ValueError: if it is not one image.
    """
    ax = axes_or_new(ax)
    ax.imshow(plane("image", image, image.shape[-2:]).numpy(), cmap=colours, vmin=limits[0], vmax=limits[1])
    ax.spines[:].set_visible(True)
    ax.set_title(title, fontsize="medium")
    ax.set(xticks=[], yticks=[])
    return ax


def error_against_std(rec: Reconstruction, truth: Tensor, ax: Axes | None = None) -> Axes:
    r"""Draw the mean |error| against the standard deviation.

    Pixels are sorted by their standard deviation into ten bins of equally many, with the standard error of each mean as
    if pixels were independent. A calibrated Gaussian has a mean |error| of :math:`\sqrt{2/\pi}` std.

    Args:
        rec: of images with one channel.
        truth: the true image, (..., H, W).
        ax: where to draw.

    Raises:
        ValueError: if the truth has another shape than the images of ``rec``.
    """
    error, std = _errors(rec, truth)
    order = std.argsort().tensor_split(_BINS)
    rows = [(std[i].mean(), error[i].abs().mean(), error[i].abs().std() / len(i) ** 0.5) for i in order if len(i) > 1]
    x, y, standard_error = torch.tensor(rows, dtype=torch.float64).mT.numpy()
    ax = axes_or_new(ax)
    ax.axline((0, 0), slope=math.sqrt(2 / math.pi), color=GUIDE, linewidth=0.8, label="calibrated Gaussian")
    ax.errorbar(x, y, standard_error, fmt="o", color=AFTER, markersize=4, label="a tenth of the pixels")
    ax.set(xlabel="standard deviation", ylabel="mean |error|", title="error against standard deviation")
    ax.legend(frameon=False, fontsize="small")
    return ax


def error_quantiles(rec: Reconstruction, truth: Tensor, ax: Axes | None = None) -> Axes:
    """Draw quantiles of (x − mean) / std over pixels against those of a Gaussian.

    Args:
        rec: of images with one channel.
        truth: the true image, (..., H, W).
        ax: where to draw.

    Raises:
        ValueError: if the truth has another shape than the images of ``rec``.
    """
    error, std = _errors(rec, truth)
    z = (error / std).sort().values
    normal = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(len(z), dtype=z.dtype) + 0.5) / len(z))
    ax = axes_or_new(ax)
    ax.axline((0, 0), slope=1, color=GUIDE, linewidth=0.8)
    ax.plot(normal.numpy(), z.numpy(), ".", color=AFTER, markersize=4)
    ax.set(xlabel="quantile of a Gaussian", ylabel="quantile of (x − mean) / std")
    ax.set(title=f"{(z.abs() <= 2).double().mean():.0%} of pixels within two std")
    if beyond := int((z.abs() > _LIMIT).sum()):
        ax.set_ylim(-_LIMIT, _LIMIT)
        ax.text(0.02, 0.98, f"{beyond} beyond ±{_LIMIT}", transform=ax.transAxes, va="top")
    return ax


def loss_curve(dip: DeepImagePrior, ax: Axes | None = None) -> Axes:
    """Draw the loss of a deep image prior by step, and the step whose weights are kept."""
    ax = axes_or_new(ax)
    ax.semilogy(dip.losses, color=AFTER, linewidth=0.9)
    ax.plot(dip.step, dip.losses[dip.step], "o", color="black", markersize=4, label="weights that are kept")
    ax.set(title="deep image prior", xlabel="step of training", ylabel="loss")
    ax.legend(frameon=False, fontsize="small")
    return ax


def plane(name: str, x: Tensor, size: torch.Size) -> Tensor:  # (..., H, W) -> (H, W)
    """Return one image in double precision.

    Raises:
        ValueError: if it has another size, or there are more.
    """
    if x.shape[-2:] != size or x.numel() != size.numel():
        raise ValueError(f"{name} must be one image of shape {tuple(size)}, but has {tuple(x.shape)}")
    return x.detach().double().cpu().reshape(size)


def image_size(rec: Reconstruction) -> torch.Size:
    """Return (H, W).

    Raises:
        ValueError: if its images have several channels.
    """
    if len(rec.shape) != 3 or rec.shape[0] != 1:
        raise ValueError(f"rec must be of images with the shape (1, H, W), but they have {tuple(rec.shape)}")
    return torch.Size(rec.shape[-2:])


def _errors(rec: Reconstruction, truth: Tensor) -> tuple[Tensor, Tensor]:  # (H W,), (H W,)
    """Return the truth less the mean, and the standard deviation."""
    size = image_size(rec)
    mean, std = (plane(name, x, size).flatten() for name, x in (("mean", rec.mean), ("std", rec.std)))
    return plane("truth", truth, size).flatten() - mean, std
