"""``ntkgp demo``: from data to a page, and on from there."""

import json
import os

import numpy as np
import pytest

import ntkgp
from ntkgp.cli import main
from ntkgp.commands.demo import make_classifier


def test_classify_ends_with_a_table_a_page_and_a_posterior_to_go_on_with(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--steps", "30"]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[1].split() == ["network", "alone", "posterior", "difference"]
    assert sorted(os.listdir("demo-classify")) == [
        "post",
        "report.html",
        "test.npz",
        "train.npz",
        "weights.safetensors",
    ]
    command = told.splitlines()[-1].removeprefix("go on: ntkgp ").split()
    assert main(command) == 0
    assert (tmp_path / "predictions.csv").read_text().count("\n") == 286
    net = make_classifier()
    with pytest.raises(ValueError, match="weights or buffers do not"):
        ntkgp.load("demo-classify/post", net)
    with pytest.raises(SystemExit):
        main(["demo"])
    assert "must be new or empty without --overwrite" in capsys.readouterr().err


def test_regress_shows_bands(tmp_path, capsys):
    assert main(["demo", "regress", "--steps", "30", "-o", str(tmp_path / "out"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["scores"]) == ["NLL", "RMSE", "90% interval holds"]
    assert "± 2 std of f" in (tmp_path / "out" / "report.html").read_text()
    x = np.load(tmp_path / "out" / "train.npz")["X"]
    assert (np.abs(x).min() > 1, len(x)) == (True, 100)  # the gap


def test_reconstruct_draws_its_figures(tmp_path, capsys):
    assert main(["demo", "reconstruct", "--steps", "5", "-o", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out.splitlines()
    assert any(line.startswith("PSNR of the mean ") for line in told)
    assert told[-1] == str(tmp_path / "out" / "index.html")
    assert (tmp_path / "out" / "calibration.png").stat().st_size > 10_000
