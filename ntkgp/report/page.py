"""One HTML page that holds all it shows: no scripts, no files beside it, no network."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Plate", "page"]

_STYLE = """
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 system-ui, sans-serif; color: #222; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; } figcaption { color: #555; }
table { border-collapse: collapse; } th { font-weight: normal; text-align: left; color: #555; }
th, td { padding: 0.15rem 1.5rem 0.15rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }
"""


@dataclass(frozen=True)
class Plate:
    """A figure and the sentence below it."""

    png: bytes
    caption: str


def page(title: str, text: str, tables: Mapping[str, Mapping[str, object]], plates: Sequence[Plate]) -> str:
    """Return an HTML document.

    Args:
        title: of the page, and its heading.
        text: a paragraph below it.
        tables: by heading, names and their values. The first comes before the figures, all others after them.
        plates: the figures.
    """
    first, *others = (_table(heading, rows) for heading, rows in tables.items())
    head = ['<meta charset="utf-8">', f"<title>{escape(title)}</title>", f"<style>{_STYLE}</style>"]
    body = [f"<h1>{escape(title)}</h1>", f"<p>{escape(text)}</p>", first, *map(_figure, plates), *others]
    lines = ["<!DOCTYPE html>", '<html lang="en">', "<head>", *head, "</head>", "<body>", *body, "</body>", "</html>"]
    return "\n".join(lines) + "\n"


def _table(heading: str, rows: Mapping[str, object]) -> str:
    cells = "\n".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in rows.items())
    return f"<h2>{escape(heading)}</h2>\n<table>\n{cells}\n</table>"


def _figure(plate: Plate) -> str:
    caption, data = escape(plate.caption), b64encode(plate.png).decode()
    image = f'<img src="data:image/png;base64,{data}" alt="{caption}">'
    return f"<figure>\n{image}\n<figcaption>{caption}</figcaption>\n</figure>"
