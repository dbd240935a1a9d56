"""Results that belong to inputs: found again by the inputs' own numbers, forgotten oldest first."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from torch import Tensor

from ntkgp.linearization.inputs import Input, map_leaves, same_input

__all__ = ["InputCache"]


@dataclass(frozen=True, eq=False)
class _Entry:
    key: Hashable
    inputs: tuple[Input | None, ...]
    value: Tensor


class InputCache:
    """Results by (key, inputs). Inputs are kept as copies and compared bit for bit, so a changed one misses.

    Args:
        limit: bytes of tensors to keep; the results used longest ago go first.
    """

    def __init__(self, limit: int = 4 << 30) -> None:
        self.limit = limit
        self._entries: list[_Entry] = []

    def get(self, key: Hashable, inputs: tuple[Input | None, ...], make: Callable[[], Tensor]) -> Tensor:
        """Return the result under ``key`` for ``inputs``, made now if it is not there."""
        entry = self._find(key, inputs)
        if entry is None:
            copies = tuple(None if x is None else map_leaves(lambda leaf: leaf.detach().clone(), x) for x in inputs)
            entry = _Entry(key, copies, make())
        else:
            self._entries.remove(entry)
        self._entries.append(entry)
        while sum(e.value.nbytes for e in self._entries) > self.limit:
            self._entries.pop(0)
        return entry.value

    def has(self, key: Hashable, inputs: tuple[Input | None, ...]) -> bool:
        """Tell whether a result is there."""
        return self._find(key, inputs) is not None

    def clear(self) -> None:
        """Forget everything."""
        self._entries = []

    def _find(self, key: Hashable, inputs: tuple[Input | None, ...]) -> _Entry | None:
        for entry in self._entries:
            if entry.key == key and all(_same(x, y) for x, y in zip(entry.inputs, inputs, strict=True)):
                return entry
        return None


def _same(x: Input | None, y: Input | None) -> bool:
    if x is None or y is None:
        return x is y
    return same_input(x, y)
