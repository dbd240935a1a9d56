"""What the site adds to the pages: formulas, and the benchmarks' tables, which lie outside of docs/."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
from formulas import with_formulas

TABLES = Path(__file__).parents[2] / "benchmarks" / "results"


def on_files(files: Files, config: Any) -> Files:
    """Add the benchmarks' tables as pages."""
    for table in sorted(TABLES.glob("*.md")):
        files.append(File.generated(config, f"benchmarks/{table.name}", content=table.read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Draw formulas, and lead links to and from the tables to where they are on the site."""
    up = "../" * page.file.src_uri.count("/")
    markdown = markdown.replace(f"{up}../benchmarks/results/", f"{up}benchmarks/").replace("../../docs/", "../")
    return with_formulas(markdown)
