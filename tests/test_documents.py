"""What the documents and examples say, runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda text: text.splitlines()[2][:30])
def test_the_readmes_snippets_run(snippet, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_the_readme_has_snippets():
    assert len(SNIPPETS) == 5


def test_the_demo_shows_a_classifier_put_right(tmp_path):
    command = [sys.executable, "examples/overconfident.py", "--output", tmp_path, "--splits", "2"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    nll = [float(line.split()[-12]) for line in result.stdout.splitlines() if "±" in line and "error" not in line]
    assert nll[2] < nll[1] < nll[0]  # refined posterior, posterior, network
    assert (tmp_path / "overconfident.png").stat().st_size > 10_000


def test_the_example_of_exact_regression_prints_a_table_and_draws_a_figure(tmp_path):
    command = [
        sys.executable,
        "examples/exact_gp_regression.py",
        "--output",
        tmp_path,
        "--steps",
        "20",
        "--tuning-steps",
        "5",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.search(r"linearised GP +\d\.\d{3} +\d+\.\d{3} +\d+\.\d %", result.stdout)
    assert (tmp_path / "exact_gp_regression.png").stat().st_size > 10_000


def test_the_example_of_a_reconstruction_prints_scores_and_draws_figures(tmp_path):
    command = [
        sys.executable,
        "examples/reconstruction.py",
        "--output",
        tmp_path,
        "--steps",
        "50",
        "--tuning-steps",
        "2",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    scores = re.findall(
        r"^(filtered back-projection|total variation|network) +(\d+\.\d) dB$", result.stdout, re.MULTILINE
    )
    assert [name for name, _ in scores] == ["filtered back-projection", "total variation", "network"]
    assert re.search(r"pixels within two standard deviations: \d+%", result.stdout)
    names = {"reconstruction.png", "reconstruction_calibration.png", "reconstruction_convergence.png"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_the_example_of_an_autoencoder_prints_a_table_and_draws_a_figure(tmp_path):
    command = [sys.executable, "examples/laplacian_autoencoder.py", "--small", "--output", tmp_path]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = re.findall(r"^(plain|Laplace, \w+(?: \w+)?) +([-\d. ]+)$", result.stdout, re.MULTILINE)
    assert [name for name, _ in rows] == ["plain", "Laplace, post hoc", "Laplace, online"]
    numbers = [[float(value) for value in line.split()] for _, line in rows]
    assert numbers[0][3:] == [0.5, 0.5, 0.5, 0.5]  # one network does not disagree with itself
    assert numbers[1][3] > 0.6
    assert numbers[2][2] > numbers[1][2]  # drawn networks reconstruct better after training with them
    assert (tmp_path / "laplacian_autoencoder.png").stat().st_size > 10_000


def test_the_map_of_the_code_names_every_module():
    text = (ROOT / "docs" / "architecture.md").read_text()
    modules = [p.name for p in (ROOT / "ntkgp").rglob("*.py") if p.name != "__init__.py" and "priors" not in p.parts]
    assert [name for name in modules if name not in text and name not in ("ntk.py", "mean.py")] == []
