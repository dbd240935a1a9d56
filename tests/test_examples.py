"""Every example runs in its small mode, says what it should and draws its figure."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
NUMBER = r" *(-?\d+\.\d+)"


def run(name, output, capsys, monkeypatch):
    """Run an example as a user would, but in this process, where torch is there already."""
    monkeypatch.setattr(sys, "argv", [name, "--small", "--output", str(output)])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    state = torch.get_rng_state()
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        torch.set_rng_state(state)
    return capsys.readouterr().out


def numbers(pattern, text):
    """Return what the groups of the pattern hold, of its first place in the text."""
    found = re.search(pattern.replace("#", NUMBER), text)
    assert found, f"{pattern!r} not found in\n{text}"
    return [float(group) for group in found.groups()]


def in_between(out):
    at, gap = numbers("full##", out)
    assert gap > 5 * at
    assert numbers("diag##", out)[1] < gap


def banana(out):
    assert max(numbers("network +NLL#", out) + numbers("posterior +NLL#", out)) < 0.4


def own_likelihood(out):
    assert numbers("Gaussian +peak#", out)[0] < 1.3 < numbers("Censored +peak#", out)[0]


def approximate_gp(out):
    first, last = numbers("evidence:# at first,# at last", out)
    assert last > first


def bayesian_optimisation(out):
    assert numbers("network +#", out)[0] < -0.39


def active_learning(out):
    epistemic, random = numbers("5 labels more: +epistemic# +random#", out)
    assert epistemic < random


def continual(out):
    assert float(re.search(r"at once: (\S+)", out)[1]) < 1e-8
    assert numbers(" 80 points:.*RMSE.*\\]#", out) < numbers(" 20 points:.*RMSE.*\\]#", out)


def evidence_training(out):
    assert numbers("by layer#", out)[0] < numbers("1000#", out)[0]


def fashion_mnist(out):
    assert numbers("posterior##", out)[1] > 0.5


def pretrained_resnet20(out):
    assert "170 weights" in out
    assert numbers("posterior +blurred####", out)[-1] > numbers("network +blurred####", out)[-1]  # nats of entropy


def overconfident(out):
    nll = [float(line.split()[-12]) for line in out.splitlines() if "±" in line and "error" not in line]
    assert nll[2] < nll[1] < nll[0]  # refined posterior, posterior, network


def exact_gp_regression(out):
    assert re.search(r"linearised GP +\d\.\d{3} +\d+\.\d{3} +\d+\.\d %", out)


def reconstruction(out):
    scores = re.findall(r"^(filtered back-projection|total variation|network) +(\d+\.\d) dB$", out, re.MULTILINE)
    assert [name for name, _ in scores] == ["filtered back-projection", "total variation", "network"]
    assert re.search(r"pixels within two standard deviations: \d+%", out)


def sinogram_file(out):
    misfit, sigma = numbers("explained to#, noise by evidence#", out)
    assert 0 < sigma < 10 * misfit
    median, largest = numbers("median#, largest#", out)
    assert 0 < median < largest


def laplacian_autoencoder(out):
    rows = re.findall(r"^(plain|Laplace, \w+(?: \w+)?) +([-\d. ]+)$", out, re.MULTILINE)
    assert [name for name, _ in rows] == ["plain", "Laplace, post hoc", "Laplace, online"]
    plain, post_hoc, online = ([float(value) for value in line.split()] for _, line in rows)
    assert plain[3:] == [0.5, 0.5, 0.5, 0.5]  # one network does not disagree with itself
    assert post_hoc[3] > 0.6
    assert online[2] > post_hoc[2]  # drawn networks reconstruct better after training with them


CLAIMS = [
    in_between,
    banana,
    own_likelihood,
    approximate_gp,
    bayesian_optimisation,
    active_learning,
    continual,
    evidence_training,
    fashion_mnist,
    pretrained_resnet20,
    overconfident,
    exact_gp_regression,
    reconstruction,
    sinogram_file,
    laplacian_autoencoder,
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
@pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning")
@pytest.mark.filterwarnings("ignore:the mode of the linear model gains")  # after a few steps of training it does
def test_it_runs_and_shows_what_it_says(claim, tmp_path, capsys, monkeypatch):
    out = run(claim.__name__, tmp_path, capsys, monkeypatch)
    claim(out)
    figures = [path for path in tmp_path.iterdir() if path.suffix == ".png"]
    assert figures
    assert all(path.stat().st_size > 5_000 for path in figures)


def test_two_processes_find_what_one_finds(tmp_path):
    script = [str(EXAMPLES / "two_processes.py"), "--small", "--output", str(tmp_path)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    found = []
    for command, world in (([sys.executable], 1), (torchrun, 2)):
        result = subprocess.run([*command, *script], capture_output=True, text=True, timeout=300, check=True)
        assert f"processes: {world}" in result.stdout
        found.append(numbers("variances:#", result.stdout)[0])
    assert found[0] == found[1] > 0
