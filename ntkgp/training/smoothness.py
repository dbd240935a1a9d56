"""Activations whose second derivative is a spike where nobody looks: not to be trained through by squared gradients."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ntkgp.linearization.graph import trace

__all__ = ["evaluating", "piecewise_linear", "require_smooth"]

_KINKS = {
    "ReluBackward0": "relu",
    "LeakyReluBackward0": "leaky_relu",
    "HardtanhBackward0": "hardtanh or relu6",
    "ThresholdBackward0": "threshold",
    "PreluKernelBackward0": "prelu",
    "RreluWithNoiseBackward0": "rrelu",
    "HardsigmoidBackward0": "hardsigmoid",
    "HardshrinkBackward0": "hardshrink",
    "SoftshrinkBackward0": "softshrink",
}


def piecewise_linear(f: Tensor) -> list[str]:
    """Return the piecewise-linear activations in the graph below ``f``, whoever called them."""
    return sorted({_KINKS[name] for name in trace(f).names if name in _KINKS})


def require_smooth(f: Tensor) -> None:
    """Refuse networks with piecewise-linear activations.

    Their second derivative is zero almost everywhere and infinite at the kink, where no input lies: the gradient of a
    squared gradient misses what matters (Unlu & Aitchison 2021, Section 4.3).

    Raises:
        ValueError: if there are some; it names them.
    """
    found = piecewise_linear(f)
    if found:
        raise ValueError(
            f"the network uses {', '.join(found)}, piecewise linear: squared gradients cannot be trained through it. "
            'Use a smooth activation such as softplus, or pass activations="any" to train all the same'
        )


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Put a network in evaluation mode for a look at it, and each of its modules back: statistics stay as they are."""
    modes = {module: module.training for module in net.modules()}
    try:
        net.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
