"""Arguments that commands share."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ntkgp.likelihoods import LIKELIHOODS

__all__ = ["add_model_arguments", "nonnegative", "positive"]


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what makes a network, its weights, its data and the likelihood."""
    add = parser.add_argument
    add("network", metavar="package.module:make_net", help="the function that makes the network")
    add("--weights", type=Path, required=True, metavar="w.safetensors", help="of the trained network")
    add("--data", type=Path, required=True, metavar="d.npz", help="X and y that it was trained on")
    add("--likelihood", choices=tuple(LIKELIHOODS), required=True, help="of y given the network's outputs")
    add("--dtype", choices=("float32", "float64"), help="to convert network and data to (default: the network's)")


def positive(kind: type) -> Callable[[str], Any]:
    """Return a parser of positive numbers."""
    return _number(kind, lambda value: value > 0, "be positive")


def nonnegative(kind: type) -> Callable[[str], Any]:
    """Return a parser of numbers from zero on."""
    return _number(kind, lambda value: value >= 0, "not be negative")


def _number(kind: type, holds: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not (holds(value) and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"must {expected}, but is {text}")
        return value

    parse.__name__ = kind.__name__  # for argparse: invalid int value
    return parse
