"""What the documents and examples say, runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["docs/index.md", "docs/concepts.md", "docs/howto.md", "docs/extending.md"]


def snippets(path):
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


@pytest.mark.parametrize("snippet", snippets("README.md"), ids=["error bars", "GP", "images"])
def test_the_readmes_snippets_run(snippet, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_a_front_door_has_a_dozen_lines():
    for snippet in snippets("README.md"):
        assert len([line for line in snippet.splitlines() if line]) <= 12


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.filterwarnings("ignore:the mode of the linear model gains")  # these networks are not trained
@pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.NumericsWarning")
def test_the_documents_snippets_run_one_after_the_other(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for snippet in snippets(page):
        exec(compile(snippet, page, "exec"), names)
    printed = capsys.readouterr().out
    assert printed
    assert "False" not in printed  # what they compare, agrees


def test_links_between_documents_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_every_target_of_make_says_what_it_does():
    lines = (ROOT / "Makefile").read_text().splitlines()
    phony = next(line for line in lines if line.startswith(".PHONY:")).split()[1:]
    told = {line.partition(":")[0] for line in lines if "## " in line}
    assert set(phony) <= told


def test_the_map_of_the_code_names_every_module():
    text = (ROOT / "docs" / "architecture.md").read_text()
    modules = [p.name for p in (ROOT / "ntkgp").rglob("*.py") if p.name != "__init__.py" and "priors" not in p.parts]
    assert [name for name in modules if name not in text and name not in ("ntk.py", "mean.py")] == []
