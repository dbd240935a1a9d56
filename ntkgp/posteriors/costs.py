"""Estimates of what methods cost, as a table that prints."""

from dataclasses import dataclass

__all__ = ["FitPlan", "MethodCost"]


@dataclass(frozen=True)
class MethodCost:
    """An estimate of what one method takes."""

    method: str
    gives: str
    passes: float  # seconds, over the data
    algebra: float  # seconds, again whenever hyperparameters change
    kept: float  # bytes, after fitting and a prediction
    peak: float  # bytes, while it is fitted and tuned
    counted: bool = True  # whether all steps are; otherwise iterations are of a typical number

    @property
    def seconds(self) -> float:
        """Fitting without tuning."""
        return self.passes + self.algebra


@dataclass(frozen=True)
class FitPlan:
    """Estimates for every method; ``print`` it to see them, ``plan["kron"]`` is one of them."""

    num_data: int
    num_outputs: int
    num_params: int
    memory_budget: int
    costs: tuple[MethodCost, ...]
    chosen: str  # by method="auto"
    reason: str

    def __getitem__(self, method: str) -> MethodCost:
        """Return the estimate of a method.

        Raises:
            KeyError: if there is none.
        """
        for cost in self.costs:
            if cost.method == method:
                return cost
        raise KeyError(f"method must be one of {', '.join(cost.method for cost in self.costs)}, but is {method!r}")

    def __str__(self) -> str:
        table = [("method", "gives", "fit", "of it algebra", "keeps", "peak", "")]
        for cost in self.costs:
            marks = ["iterations assumed"] * (not cost.counted)
            marks += ["beyond the budget"] * (cost.peak > self.memory_budget) + ["auto"] * (cost.method == self.chosen)
            sizes = (_bytes(cost.kept), _bytes(cost.peak), ", ".join(marks))
            table.append((cost.method, cost.gives, _seconds(cost.seconds), _seconds(cost.algebra), *sizes))
        widths = [max(len(row[column]) for row in table) for column in range(7)]
        lines = [
            "  ".join(
                cell.ljust(w) if i in (0, 1, 6) else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        head = (
            f"{self.num_data} points, {self.num_outputs} outputs, {self.num_params} weights; estimates for this machine"
        )
        foot = f"auto takes {self.chosen}: {self.reason}"
        return "\n".join([head, *lines, foot, "tuning comes on top: it repeats the algebra at each of its steps"])


def _seconds(value: float) -> str:
    if value < 0.1:
        return f"{1e3 * value:.2g} ms"
    if value < 120:
        return f"{value:.2g} s"
    return f"{value / 60:.2g} min" if value < 7200 else f"{value / 3600:.2g} h"


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"
