"""What predictions are worth: metrics, scores with errors, one page of all; figures in ``ntkgp.report.figures``."""

from ntkgp.report import metrics
from ntkgp.report.report import Report, report

__all__ = ["Report", "metrics", "report"]
