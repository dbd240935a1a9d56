"""The same call under torchrun: data are shared, results are those of one process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

SCRIPT = Path(__file__).with_name("ranks.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(command, out, victim=-1):
    out.mkdir(exist_ok=True)
    return subprocess.run(
        [*command, str(SCRIPT), str(out), str(victim)], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process finds."""
    out = tmp_path_factory.mktemp("one")
    result = run([sys.executable], out)
    assert result.returncode == 0, result.stderr
    return torch.load(out / "found.pt")


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for data, values in expected.items():
        for what, value in values.items():
            assert_close(found[data][what], value, rtol=1e-10, atol=1e-10, msg=lambda m: f"{data}, {what}: {m}")  # noqa: B023


def test_two_ranks_find_what_one_finds(alone, tmp_path):
    result = run(TORCHRUN, tmp_path / "two")
    assert result.returncode == 0, result.stderr
    assert_same(torch.load(tmp_path / "two" / "found.pt"), alone)


def test_a_rank_that_dies_ends_the_run_with_a_clear_message_and_the_next_one_resumes(alone, tmp_path):
    out = tmp_path / "run"
    result = run(TORCHRUN, out, victim=1)
    assert result.returncode != 0
    assert re.search(r"exitcode\s*: 3", result.stderr)
    assert not (out / "found.pt").exists()
    assert (out / "memory.state").exists()
    result = run(TORCHRUN, out)
    assert result.returncode == 0, result.stderr
    assert_same(torch.load(out / "found.pt"), alone)
