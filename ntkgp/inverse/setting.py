"""What is decided, and refused, before a network is trained: which method, and which prior over which weights."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ntkgp.inverse.operators import Measurement
from ntkgp.inverse.priors import PRIORS
from ntkgp.inverse.unet import UNet
from ntkgp.linearization import Linearization
from ntkgp.posteriors import SampledPosterior
from ntkgp.priors import Prior

__all__ = ["METHODS", "TUNINGS", "PriorChoice", "Setting", "settled"]

TUNINGS = ("evidence", "predcp")
METHODS = ("auto", "exact", "sampled")
PriorChoice = str | Callable[[Linearization], Prior]
_EXACT_BYTES = 2 << 30  # that the exact method may take
_WORK = 4  # matrices over pixels beside those that are kept
_OPTIONS = {
    name
    for name, p in inspect.signature(SampledPosterior).parameters.items()
    if p.kind is inspect.Parameter.KEYWORD_ONLY
}


@dataclass(frozen=True)
class Setting:
    """How a trained network becomes a Gaussian model."""

    exact: bool
    prior: PriorChoice
    tune: str | None
    noise: float | None  # σ², if it is given
    penalty: float  # γ
    parameters: list[str]  # which of the network's are random
    options: dict[str, Any]  # of SampledPosterior


def settled(
    A: Measurement,
    net: nn.Module,
    prior: PriorChoice | None,
    tune: str | None,
    method: str,
    noise: float | None,
    penalty: float,
    options: dict[str, Any],
) -> Setting:
    """Check what :func:`linearized` was asked for, and decide what was left open.

    Raises:
        TypeError: if an option is not one of a sampled posterior's, or the exact method is given one.
        ValueError: if a name is not known, a number cannot be, or choices do not go together.
    """
    if tune is not None and tune not in TUNINGS:
        raise ValueError(f"tune must be one of {', '.join(TUNINGS)} or None, but is {tune!r}")
    if isinstance(prior, str) and prior not in PRIORS:
        raise ValueError(f"prior must be one of {', '.join(PRIORS)} or a function, but is {prior!r}")
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, but is {method!r}")
    if noise is not None and not noise > 0:
        raise ValueError(f"noise must be positive, but is {noise}")
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise TypeError(f"options must be among {', '.join(sorted(_OPTIONS))}, but there is {', '.join(unknown)}")
    if method == "exact" and options:
        raise TypeError(f'options are for method="sampled", but method is "exact" and there is {", ".join(options)}')
    parameters = random_parameters(net)
    filters = "conv_filter" if _filters(net, parameters) else "layerwise"
    exact = method == "exact" or (
        method == "auto" and exact_bytes(A, net, parameters, prior or filters) <= _EXACT_BYTES
    )
    chosen = prior or (filters if exact else "layerwise")
    if tune == "predcp":
        _check_predcp(A, chosen, exact, penalty)
    if tune is not None and not exact and chosen == "conv_filter":
        raise ValueError(
            'prior="conv_filter" has no precisions, which is what samples tune: use "layerwise", tune=None or '
            'method="exact"'
        )
    return Setting(exact, chosen, tune, noise, penalty, parameters, options)


def _check_predcp(A: Measurement, prior: PriorChoice, exact: bool, penalty: float) -> None:
    if not exact or (isinstance(prior, str) and prior != "conv_filter"):
        name, method = prior if isinstance(prior, str) else "a function", "exact" if exact else "sampled"
        raise ValueError(
            f'tune="predcp" is for prior="conv_filter" and method="exact", but the prior is {name} and the method '
            f"{method}"
        )
    if not penalty > 0:
        raise ValueError(f'penalty must be positive for tune="predcp", which matches it, but is {penalty}')
    if len(A.image_shape) != 3 or A.image_shape[0] != 1:
        raise ValueError(f'tune="predcp" is for images of shape (1, H, W), but they have {tuple(A.image_shape)}')


def random_parameters(net: nn.Module) -> list[str]:
    """Return the weights of convolutions, as everything else has no prior; in a network without any, all parameters."""
    convolutions = [name for name, m in net.named_modules() if isinstance(m, nn.modules.conv._ConvNd)]
    weights = [f"{name}.weight" if name else "weight" for name in convolutions]
    return weights or [name for name, _ in net.named_parameters()]


def exact_bytes(A: Measurement, net: nn.Module, parameters: list[str], prior: PriorChoice) -> int:
    """Return what the exact method takes: the Jacobian of the image once, and a Gram matrix or two for every atom."""
    shapes = {name: p.shape for name, p in net.named_parameters()}
    P = sum(shapes[name].numel() for name in parameters)
    d_x, d_y, atoms = A.image_shape.numel(), A.measured_shape.numel(), _atoms(net, parameters, prior)
    return 8 * (d_x * P + (atoms + _WORK) * d_x**2 + (atoms + _WORK) * d_y**2)


def _atoms(net: nn.Module, parameters: list[str], prior: PriorChoice) -> int:
    if prior == "iid":
        return 1
    if prior != "conv_filter":
        return len(parameters)
    filters, blocks = _filters(net, parameters), net.blocks if isinstance(net, UNet) else {}
    first = {block: names[0] for block, names in blocks.items()} | {
        name: name for name in filters if not any(name in names for names in blocks.values())
    }
    return sum(_distances(filters[name]) for name in first.values()) + len(parameters) - len(filters)


def _filters(net: nn.Module, parameters: list[str]) -> dict[str, tuple[int, ...]]:
    """Return the sizes of filters of more than one weight."""
    shapes = {name: tuple(p.shape[2:]) for name, p in net.named_parameters() if name in parameters}
    return {name: size for name, size in shapes.items() if any(s > 1 for s in size)}


def _distances(size: tuple[int, ...]) -> int:
    """Return how many different distances the points of a grid have."""
    squared = {0}
    for n in size:
        squared = {d + step**2 for d in squared for step in range(n)}
    return len(squared)
