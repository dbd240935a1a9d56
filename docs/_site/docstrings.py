"""Docstrings as Markdown: formulas, references and code that they write in Sphinx's way."""

import re
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from formulas import with_formulas

_CODE = re.compile(r"^( *)\.\. code-block:: python\n\n((?:\1    .*\n|\n)+)", re.MULTILINE)
_ROLE = re.compile(r":(?:class|func|meth|mod):`~?([^`]*)`")


class Markdown(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one."""
        if obj.docstring is not None:
            text = _CODE.sub(
                lambda m: f"{m[1]}```python\n{_indented(m[2], m[1])}{m[1]}```\n\n", obj.docstring.value + "\n"
            )
            text = _ROLE.sub(lambda m: f"`{m[1].removeprefix('ntkgp.')}`", text)
            obj.docstring.value = with_formulas(text).rstrip()


def _indented(code: str, indent: str) -> str:
    return "".join(f"{indent}{line}\n" if line else "\n" for line in dedent(code).strip("\n").splitlines())
