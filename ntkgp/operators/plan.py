"""What a Gram matrix costs, layer by layer, and which engine computes it cheapest."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import ceil

import torch

from ntkgp.linearization import Features, Linearization
from ntkgp.linearization.factors import Outer

__all__ = ["Cost", "Plan", "machine_rates", "make_plan", "shortest"]

_RESULT = "K"
_CALIBRATION = 1024  # side of the matrices that are timed to learn how fast the machine is


@dataclass(frozen=True)
class Rates:
    """How fast the machine multiplies matrices and moves numbers."""

    flops: float  # per second
    bytes: float  # per second


@cache
def machine_rates(dtype: torch.dtype, device: torch.device) -> Rates:
    """Time a matrix product and a pass over memory on the device; some milliseconds, once."""
    a = torch.ones(_CALIBRATION, _CALIBRATION, dtype=dtype, device=device)
    long = torch.ones(8 << 20, dtype=dtype, device=device)
    return Rates(2 * _CALIBRATION**3 / shortest(lambda: a @ a), 2 * long.nbytes / shortest(lambda: long.mul_(1)))


def shortest(function: Callable[[], object], repeats: int = 3) -> float:
    """Return the seconds of the quickest call, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


@dataclass(frozen=True)
class Cost:
    """One step of the work: what takes part, how, and what that takes."""

    layer: str
    rule: str
    flops: float
    bytes: float


@dataclass(frozen=True)
class Plan:
    """The cost of a Gram matrix under one engine; ``print`` it to see where time and memory go."""

    engine: str
    reason: str
    costs: tuple[Cost, ...]
    rates: Rates

    @property
    def flops(self) -> float:
        """Floating point operations of the whole."""
        return sum(cost.flops for cost in self.costs)

    @property
    def bytes(self) -> float:
        """Memory held at the end: the result and what it is made from."""
        return sum(cost.bytes for cost in self.costs)

    @property
    def seconds(self) -> float:
        """Predicted time of the whole."""
        return sum(self.seconds_of(cost) for cost in self.costs)

    def seconds_of(self, cost: Cost) -> float:
        """Predict the time of one step: its operations, and one pass over what it makes."""
        return cost.flops / self.rates.flops + cost.bytes / self.rates.bytes

    def __str__(self) -> str:
        table = [("layer", "rule", "Gflop", "MB", "seconds")]
        table += [
            (c.layer, c.rule, f"{c.flops / 1e9:.3g}", f"{c.bytes / 1e6:.3g}", f"{self.seconds_of(c):.2g}")
            for c in self.costs
        ]
        table += [("total", "", f"{self.flops / 1e9:.3g}", f"{self.bytes / 1e6:.3g}", f"{self.seconds:.2g}")]
        widths = [max(len(row[column]) for row in table) for column in range(5)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in pairs[:2]), *(cell.rjust(w) for cell, w in pairs[2:])])
            for pairs in ([*zip(row, widths, strict=True)] for row in table)
        ]
        return "\n".join([f"engine: {self.engine} ({self.reason})", *lines])


def make_plan(lin: Linearization, n1: int, n2: int | None, engine: str, memory_budget: int) -> Plan:
    """Count flops and bytes of every engine and return the plan of the chosen one.

    Args:
        lin: the linearised network, which must have seen an input.
        n1: points along the rows.
        n2: points along the columns; None for a symmetric matrix, of which half is computed.
        engine: "auto" for the fewest operations within the budget, or a name to force it.
        memory_budget: bytes that features may take.

    Raises:
        ValueError: if ``engine`` is unknown or a number of points is not positive.
    """
    if n1 < 1 or (n2 is not None and n2 < 1):
        raise ValueError(f"n1 and n2 must be positive, but are {n1} and {n2}")
    rates = machine_rates(lin.dtype, lin.device)
    counted = {name: count(lin, n1, n2, memory_budget) for name, count in _COUNTS.items()}
    if engine != "auto":
        if engine not in counted:
            raise ValueError(f"engine must be auto, {' or '.join(counted)}, but is {engine!r}")
        return Plan(engine, "forced", tuple(counted[engine]), rates)
    fits = {name: costs for name, costs in counted.items() if name in _TILED or _held(costs) <= memory_budget}
    flops = {name: sum(cost.flops for cost in costs) for name, costs in fits.items()}
    best = min(flops, key=lambda name: flops[name])
    others = [f"{name} {value / flops[best]:.3g}x" for name, value in flops.items() if name != best]
    others += [f"{name} needs {_held(counted[name]) / 1e9:.3g} GB" for name in counted if name not in fits]
    return Plan(best, f"fewest operations; {', '.join(others)}", tuple(counted[best]), rates)


def _layerwise(lin: Linearization, n1: int, n2: int | None, memory_budget: int) -> list[Cost]:
    F, pairs, n = lin.pilot(), _pairs(n1, n2), n1 + (n2 or 0)
    tiles = ceil(n * F.nbytes / F.num_examples / memory_budget)
    passes = (tiles + 1) / 2  # a tile of rows meets those before it, which are captured again
    costs = [_capture(lin, passes * n)]
    for block in F.blocks:
        layer = block.weight.rpartition(".")[0] or block.weight
        costs.append(Cost(layer, _rule(block.outer), pairs * _pair_flops(block.outer), n * _bytes(block.outer)))
    for layer, width in _dense_widths(lin, F).items():
        C = F.num_outputs
        costs.append(Cost(layer, "contract", 2 * pairs * C * C * width, n * C * width * F.like.element_size()))
    return [*costs, _result(F, n1, n2)]


def _jacobian(lin: Linearization, n1: int, n2: int | None, memory_budget: int) -> list[Cost]:
    F, n, C = lin.pilot(), n1 + (n2 or 0), lin.num_outputs
    size = F.like.element_size()
    sizes = dict(zip(lin.layout.names, lin.layout.sizes, strict=True))
    costs = [_capture(lin, n)]
    for layer, names in lin.groups.items():
        p = sum(sizes[name] for name in names)
        costs.append(Cost(layer, "dense", 2 * _pairs(n1, n2) * C * C * p, n * C * p * size))
    return [*costs, _result(F, n1, n2)]


def _products(lin: Linearization, n1: int, n2: int | None, memory_budget: int) -> list[Cost]:
    F, C, columns = lin.pilot(), lin.num_outputs, n2 or n1
    tangents = C * lin.num_params * F.like.element_size()
    return [
        Cost("all", "J(x')ᵀ by point", columns * C * 2 * lin.flops, tangents),
        Cost("all", "J v", n1 * columns * C * 2 * lin.flops, 0),
        _result(F, n1, n2),
    ]


_COUNTS = {"layerwise": _layerwise, "jacobian": _jacobian, "products": _products}


_TILED = ("layerwise", "products")  # engines that keep to any budget


def _held(costs: list[Cost]) -> float:
    """Bytes beside the result."""
    return sum(cost.bytes for cost in costs if cost.layer != _RESULT)


def _capture(lin: Linearization, n: float) -> Cost:
    """One forward pass, and for each output a backward pass and the products that contract positions."""
    C = lin.num_outputs
    return Cost("all", f"{C} backward passes", n * (1 + 2 * C) * lin.flops, 0)


def _pairs(n1: int, n2: int | None) -> float:
    return n1 * (n1 + 1) / 2 if n2 is None else n1 * n2


def _rule(outer: Outer) -> str:
    if outer.shared:
        return "kronecker"
    return "outer" if outer.positions == 1 else "pairwise"


def _pair_flops(outer: Outer) -> float:
    C, T, d_out = outer.G.shape[1:]
    d_in = 1 if outer.has_indices else outer.d_in
    return 2 * (d_in + C * C) if outer.shared else 2 * T * T * (d_in + C * C * d_out) + 2 * T * T * C * C


def _bytes(outer: Outer) -> float:
    return (outer.inputs.nbytes + (0 if outer.shared else outer.G.nbytes)) / outer.inputs.shape[0]


def _dense_widths(lin: Linearization, F: Features) -> dict[str, int]:
    widths: dict[str, int] = {}
    columns = {name: c for dense in F.dense for name, c in dense.columns.items()}
    for layer, names in lin.groups.items():
        width = sum(columns[name].stop - columns[name].start for name in names if name in columns)
        if width:
            widths[layer] = width
    return widths


def _result(F: Features, n1: int, n2: int | None) -> Cost:
    return Cost(_RESULT, "write", 0, n1 * (n2 or n1) * F.num_outputs**2 * F.like.element_size())
