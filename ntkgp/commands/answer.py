"""What a command says when it is done: to a reader in lines, to a program in JSON."""

import json
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Answer", "rows", "warnings_told"]


@dataclass(frozen=True)
class Answer:
    """The result of a command."""

    text: str
    values: Mapping[str, Any]

    def json(self) -> str:
        """Return the values on one line; what is not finite is null, as JSON has no name for it."""
        return json.dumps(_plain(self.values), allow_nan=False)


def rows(pairs: Mapping[str, Any]) -> str:
    """Return names and values in two columns."""
    width = max(map(len, pairs))
    return "\n".join(f"{name:{width}}  {value}" for name, value in pairs.items())


@contextmanager
def warnings_told(prog: str) -> Iterator[list[str]]:
    """Collect warnings of the user's concern, and tell each in one line on stderr in the end."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield told
    told += [" ".join(str(warning.message).split()) for warning in caught if issubclass(warning.category, UserWarning)]
    for message in told:
        print(f"{prog}: warning: {message}", file=sys.stderr)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
