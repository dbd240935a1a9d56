"""Formulas in Markdown: LaTeX becomes MathML, which browsers draw themselves, and θ* is no emphasis."""

import re

from latex2mathml.converter import convert

__all__ = ["with_formulas"]

_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


def with_formulas(text: str) -> str:
    """Return Markdown with ``$$...$$`` and what docstrings write as math roles and directives as MathML."""
    text = "".join(part if i % 2 else part.replace("θ*", "θ&#42;") for i, part in enumerate(_CODE.split(text)))
    text = re.sub(
        r"^( *)\.\. math:: (.*(?:\n\1 +\S.*)*)", lambda m: f"{m[1]}$${' '.join(m[2].split())}$$", text, flags=re.M
    )
    text = re.sub(r":math:`([^`]*)`", lambda m: convert(m[1]), text)
    return re.sub(
        r"\$\$(.+?)\$\$", lambda m: f'<p class="formula">{convert(m[1], display="block")}</p>', text, flags=re.S
    )
