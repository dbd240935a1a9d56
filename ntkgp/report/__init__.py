"""What predictions are worth: metrics."""

from ntkgp.report import metrics

__all__ = ["metrics"]
