"""The same call under torchrun: data are shared, results are those of one process."""

import re
import subprocess
import sys
from pathlib import Path

import torch
from torch.testing import assert_close

SCRIPT = Path(__file__).with_name("ranks.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(command, out, victim=-1):
    out.mkdir()
    return subprocess.run(
        [*command, str(SCRIPT), str(out), str(victim)], capture_output=True, text=True, timeout=300, check=False
    )


def test_two_ranks_find_what_one_finds(tmp_path):
    for command, name in (([sys.executable], "one"), (TORCHRUN, "two")):
        result = run(command, tmp_path / name)
        assert result.returncode == 0, result.stderr
    one, two = (torch.load(tmp_path / name / "found.pt") for name in ("one", "two"))
    for data, values in one.items():
        for what, value in values.items():
            assert_close(two[data][what], value, rtol=1e-10, atol=1e-10, msg=lambda m: f"{data}, {what}: {m}")  # noqa: B023


def test_a_rank_that_dies_ends_the_run_with_a_clear_message(tmp_path):
    result = run(TORCHRUN, tmp_path / "run", victim=1)
    assert result.returncode != 0
    assert re.search(r"exitcode\s*: 3", result.stderr)
    assert not (tmp_path / "run" / "found.pt").exists()
