"""What predictions are worth: metrics, and with matplotlib ``ntkgp.report.figures``, which is imported by that name."""

from ntkgp.report import metrics

__all__ = ["metrics"]
