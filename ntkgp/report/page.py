"""One HTML page that holds all it shows: no scripts, no files beside it, no network; light or dark as the reader is."""

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Plate", "Section", "Table", "drawn", "page"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --faint: #59636e; --line: #d1d9e0; --paper: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --faint: #9198a1; --line: #3d444d; --paper: #0d1117; }
}
body { max-width: 64rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin: 2.5rem 0 0.5rem; }
.plates { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 2rem; }
figure { margin: 1rem 0; } img, figure svg { display: block; max-width: 100%; height: auto; }
figure:has(img) { grid-column: 1 / -1; } img { background: #ffffff; } figure svg { color: var(--ink); }
figure svg text { fill: currentColor; }
figcaption { color: var(--faint); font-size: 0.9rem; margin-top: 0.3rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; }
th { font-weight: normal; text-align: left; color: var(--faint); }
th, td { padding: 0.15rem 1.5rem 0.15rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; } .wide td { overflow-wrap: normal; }
@media (min-width: 40rem) { th, .wide td { white-space: nowrap; } }
@media (max-width: 40rem) { th, td { padding-right: 0.7rem; font-size: 0.9rem; } }
"""


@dataclass(frozen=True)
class Plate:
    """A figure, as PNG or as SVG text, and the sentence below it."""

    image: bytes | str
    caption: str


@dataclass(frozen=True)
class Table:
    """Rows of cells, the first of each its name, below a header if there is one."""

    rows: Sequence[Sequence[object]]
    header: Sequence[str] = ()

    @staticmethod
    def of(pairs: Mapping[str, object]) -> "Table":
        """Return a table of names and values."""
        return Table(list(pairs.items()))


@dataclass(frozen=True)
class Section:
    """A heading and what is below it, in this order."""

    heading: str
    text: str = ""
    table: Table | None = None
    plates: Sequence[Plate] = ()


def page(title: str, text: str, sections: Sequence[Section]) -> str:
    """Return an HTML document.

    Args:
        title: of the page, and its heading.
        text: a paragraph below it.
        sections: all else.
    """
    head = ['<meta charset="utf-8">', '<meta name="viewport" content="width=device-width, initial-scale=1">']
    head += [f"<title>{escape(title)}</title>", f"<style>{_STYLE}</style>"]
    body = [f"<h1>{escape(title)}</h1>", f"<p>{escape(text)}</p>", *map(_section, sections)]
    lines = ["<!DOCTYPE html>", '<html lang="en">', "<head>", *head, "</head>", "<body>", *body, "</body>", "</html>"]
    return "\n".join(lines) + "\n"


def drawn(ax: "Axes", name: str, caption: str) -> Plate:
    """Return a figure as SVG that takes the colour of the text around it for what is black.

    Args:
        ax: all of the figure, in matplotlib's default colours.
        name: put before all names inside, which on one page must not be those of another figure.
        caption: the sentence below it.
    """
    import matplotlib

    file = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        ax.figure.savefig(file, format="svg", transparent=True, metadata=nothing)  # type: ignore[union-attr]
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' (xmlns(:xlink)?|version)="[^"]*"', "", text)  # known to HTML
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    return Plate(re.sub(r"#000000\b", "currentColor", text), caption)


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.heading)}</h2>"]
    if section.text:
        parts.append(f"<p>{escape(section.text)}</p>")
    if section.table is not None:
        parts.append(_table(section.table))
    if section.plates:
        parts.append('<div class="plates">\n' + "\n".join(map(_figure, section.plates)) + "\n</div>")
    return "\n".join(parts)


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.header)
    lines = [f"<tr>{head}</tr>"] if head else []
    for name, *cells in table.rows:
        lines.append(f'<tr><th scope="row">{escape(str(name))}</th>{"".join(map(_cell, cells))}</tr>')
    kind = ' class="wide"' if head else ""
    return f'<div class="table"><table{kind}>\n' + "\n".join(lines) + "\n</table></div>"


def _cell(value: object) -> str:
    return f"<td>{escape(str(value))}</td>"


def _figure(plate: Plate) -> str:
    caption = escape(plate.caption)
    if isinstance(plate.image, str):
        image = plate.image.replace("<svg ", f'<svg role="img" aria-label="{caption}" ', 1)
    else:
        image = f'<img src="data:image/png;base64,{b64encode(plate.image).decode()}" alt="{caption}">'
    return f"<figure>\n{image}\n<figcaption>{caption}</figcaption>\n</figure>"
