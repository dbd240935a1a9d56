"""Every command as a process on files, as users run it: that it works, how it fails, and what Ctrl-C leaves behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_model
from torch import nn

from ntkgp.inverse import RayTransform

NETWORK = """
import os, pathlib, time
from torch import nn

def make():
    if "SLOW" in os.environ:  # long enough to be interrupted
        pathlib.Path("running").touch()
        time.sleep(60)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
"""
MODEL = ["process_network:make", "--weights", "w.safetensors", "--data", "d.npz", "--likelihood", "categorical"]
SCAN = ["scan.npz", "--geometry", "parallel", "--image-size", "8", "--tune", "none", "--samples", "2"]
COMMANDS = {
    "fit": [*MODEL, "-o", "out"],
    "plan": MODEL,
    "tune": ["post", "-o", "out"],
    "predict": ["post", "x.npz", "-o", "out.npz"],
    "report": ["post", "--test", "x.npz", "-o", "out.html"],
    "reconstruct": [*SCAN, "--steps", "5", "-o", "out"],
    "demo": ["regress", "--steps", "30", "-o", "out"],
}


def started(*words, **options):
    command = [sys.executable, "-m", "ntkgp", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def ended(*words, cwd):
    """Return exit code, stdout and stderr."""
    process = started(*words, cwd=cwd)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a network, its weights, data, a scan, and a posterior that a process fitted."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "process_network.py").write_text(NETWORK)
    torch.manual_seed(0)
    save_model(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)), str(folder / "w.safetensors"))
    X, y = torch.randn(30, 2).numpy(), np.arange(30) % 3
    np.savez(folder / "d.npz", X=X, y=y)
    np.savez(folder / "x.npz", X=X[:7], y=y[:7])
    np.savez(folder / "wide.npz", X=np.ones((7, 5), np.float32), y=y[:7])
    A = RayTransform.parallel(8, 4)
    x = torch.zeros(1, 1, 8, 8)
    x[..., 2:6, 3:6] = 0.7
    scan = {"sinogram": A(x)[0, 0].numpy(), "angles": A.geometry.angles.numpy()}
    np.savez(folder / "scan.npz", **scan)
    np.savez(folder / "short.npz", **scan | {"angles": scan["angles"][1:]})
    code, _, err = ended("fit", *MODEL, "-o", "post", cwd=folder)
    assert code == 0, err
    return folder


@pytest.fixture
def here(place, tmp_path):
    copy = tmp_path / "here"
    shutil.copytree(place, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def listed(folder):
    return sorted(name for name in os.listdir(folder) if name not in ("__pycache__", "running"))


@pytest.mark.parametrize("name", COMMANDS)
def test_it_works_and_tells_so_in_one_line_of_json(name, here):
    before = listed(here)
    code, out, err = ended(name, *COMMANDS[name], "--json", cwd=here)
    assert code == 0, err
    assert "Traceback" not in err
    assert isinstance(json.loads(out), dict)
    made = {"plan": [], "predict": ["out.npz"], "report": ["out.html"]}.get(name, ["out"])
    assert listed(here) == sorted(before + made)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("fit", {"d.npz": "none.npz"}, "file none.npz does not exist"),
        ("fit", {"d.npz": "wide.npz"}, "the network cannot take a point of X, which has shape (5,)"),
        ("fit", {"process_network:make": "nowhere:make"}, "nowhere"),
        ("plan", {"w.safetensors": "none.safetensors"}, "file none.safetensors does not exist"),
        ("plan", {"d.npz": "wide.npz"}, "the network cannot take a point of X, which has shape (5,)"),
        ("plan", {"process_network:make": "process_network:other"}, "other"),
        ("tune", {"post": "none"}, "none"),
        ("predict", {"x.npz": "none.npz"}, "file none.npz does not exist"),
        ("predict", {"x.npz": "wide.npz"}, "the network cannot take a point of X, which has shape (5,)"),
        ("report", {"x.npz": "none.npz"}, "file none.npz does not exist"),
        ("report", {"x.npz": "wide.npz"}, "the network cannot take a point of X, which has shape (5,)"),
        ("reconstruct", {"scan.npz": "none.npz"}, "none.npz does not exist"),
        ("reconstruct", {"scan.npz": "short.npz"}, "angles must have the shape (4,)"),
        ("demo", {"regress": "paint"}, "paint"),
        ("demo", {"out": "d.npz"}, "d.npz is a file"),
    ],
)
def test_it_fails_in_one_line_and_writes_nothing(name, change, match, here):
    before = listed(here)
    code, out, err = ended(name, *(change.get(word, word) for word in COMMANDS[name]), cwd=here)
    assert (code, out) == (2, "")
    line = err.splitlines()[-1]
    assert line.startswith(f"ntkgp {name}: ")
    assert match in line
    assert "Traceback" not in err
    assert listed(here) == before


@pytest.mark.parametrize("name", ["tune", "predict", "report"])
def test_a_posterior_whose_network_is_gone_is_not_used(name, here):
    (here / "process_network.py").unlink()
    before = listed(here)
    code, _, err = ended(name, *COMMANDS[name], cwd=here)
    assert code == 2
    assert "process_network" in err.splitlines()[-1]
    assert listed(here) == before


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupted_run_leaves_nothing(name, here):
    before = listed(here)
    words = ["1000000" if word in ("5", "30") else word for word in COMMANDS[name]]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # shells start background jobs deaf to it
    process = started(name, *words, cwd=here, env=os.environ | {"SLOW": "1"}, preexec_fn=heard)
    while not (here / "running").exists() and listed(here) == before and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    # Within exec(), as when classes are made, Python ends by the signal itself: shells call both 130.
    assert process.returncode in (130, -signal.SIGINT), err
    assert out == ""
    assert err.splitlines()[-1].startswith(f"ntkgp {name}: interrupted")
    assert "Traceback" not in err
    assert listed(here) == before
