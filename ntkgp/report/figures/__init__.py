"""Figures of predictions, posteriors and reconstructions. They need matplotlib, the extra ``report``.

A function that takes ``ax`` draws into it, or into a new figure that belongs to no window, and returns the axes.
"""

try:
    import matplotlib as _  # noqa: F401
except ImportError as error:
    raise ImportError("figures need matplotlib: pip install 'ntkgp[report]'") from error

from ntkgp.report.figures import axes
from ntkgp.report.figures.classes import example_images, reliability_diagram
from ntkgp.report.figures.detection import detection_curve, uncertainty_histogram
from ntkgp.report.figures.numbers import coverage_curve, prediction_bands
from ntkgp.report.figures.pixels import error_against_std, error_quantiles, loss_curve, pixel_image
from ntkgp.report.figures.reconstruction import calibration_figure, convergence_figure, reconstruction_figure
from ntkgp.report.figures.tuning import evidence_curve, group_points

__all__ = [
    "axes",
    "calibration_figure",
    "convergence_figure",
    "coverage_curve",
    "detection_curve",
    "error_against_std",
    "error_quantiles",
    "evidence_curve",
    "example_images",
    "group_points",
    "loss_curve",
    "pixel_image",
    "prediction_bands",
    "reconstruction_figure",
    "reliability_diagram",
    "uncertainty_histogram",
]
