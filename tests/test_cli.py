"""The command line: what it writes is what the library returns, and bad input ends in one line."""

import base64
import json
import os
import re
import runpy
import shlex
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

import ntkgp
from ntkgp.cli import main
from ntkgp.commands.answer import Answer
from ntkgp.commands.folder import whole_folder
from ntkgp.inverse import RayTransform, UNet
from ntkgp.report import metrics

SIZE, ANGLES = 8, 4
FAN = {"source_origin": 30.0, "source_detector": 50.0, "detectors": 13, "detector_spacing": 1.7}
QUICK = ("--steps", "5", "--rate", "1e-2", "--tune", "none")


def phantom():
    x = torch.zeros(1, 1, SIZE, SIZE)
    x[..., 2:6, 3:6] = 0.7
    return x


def save(path, A, **changes):
    arrays = {
        "sinogram": A(phantom())[0, 0].numpy(),
        "angles": A.geometry.angles.numpy(),
        "truth": phantom()[0, 0].numpy(),
    }
    arrays |= changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return str(path)


def parallel_scan(path, **changes):
    return save(path, RayTransform.parallel(SIZE, ANGLES), **changes)


def command(file, output, *more, geometry="parallel"):
    return ["reconstruct", file, "--geometry", geometry, "--image-size", str(SIZE), "-o", str(output), *more]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the folder of one run."""
    folder = tmp_path_factory.mktemp("run")
    file = parallel_scan(folder / "scan.npz")
    more = ("--samples", "4", "--penalty", "1e-3", "--seed", "3", "--noise", "0.01", "--dtype", "float64")
    assert main(command(file, folder / "out", *more, *QUICK)) == 0
    return folder / "out"


class Page(HTMLParser):
    """What a page refers to and says."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.references, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.references += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]

    def handle_data(self, data):
        self.words.append(data)


def test_arrays_are_those_of_the_library(written):
    A = RayTransform.parallel(SIZE, ANGLES, dtype=torch.float64)
    y = RayTransform.parallel(SIZE, ANGLES)(phantom()).double()
    rec = ntkgp.reconstruct(A, y, tune=None, noise=0.01, penalty=1e-3, steps=5, rate=1e-2, seed=3)
    found = np.load(written / "reconstruction.npz")
    assert np.array_equal(found["mean"], rec.mean[0].numpy())
    assert np.array_equal(found["std"], rec.std[0].numpy())
    assert np.array_equal(found["fbp"], A.fbp(y)[0, 0].numpy())
    assert np.array_equal(found["samples"], rec.sample(4, torch.Generator().manual_seed(3))[:, 0].numpy())
    assert found["noise"] == pytest.approx(0.01)
    settings = json.loads(str(found["settings"]))
    assert {name: settings[name] for name in ("geometry", "image_size", "steps", "seed", "tune", "noise")} == {
        "geometry": "parallel", "image_size": SIZE, "steps": 5, "seed": 3, "tune": "none", "noise": 0.01,
    }  # fmt: skip


def test_the_page_holds_all_and_needs_nothing(written):
    assert {path.name for path in written.iterdir()} == {
        "reconstruction.npz", "reconstruction.png", "calibration.png", "convergence.png", "index.html",
    }  # fmt: skip
    text = (written / "index.html").read_text()
    page = Page(text)
    inlined = [base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in page.references]
    names = "reconstruction", "calibration", "convergence"
    assert inlined == [(written / f"{name}.png").read_bytes() for name in names]
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert not re.search(r"https?://|url\(|@import", text)
    assert page.tags.count("figcaption") == 3
    arrays, said = np.load(written / "reconstruction.npz"), " ".join(page.words)
    assert f"{metrics.psnr(torch.tensor(arrays['mean']), phantom()[0, 0]):.2f} dB" in said
    assert f"{metrics.psnr(torch.tensor(arrays['fbp']), phantom()[0, 0]):.2f} dB" in said
    assert "noise variance, given" in said
    assert "log evidence" in said
    assert "computed exactly" in " ".join(said.split())


def test_fans_degrees_and_samples_reach_the_library(tmp_path, capsys):
    A = RayTransform.fan(SIZE, ANGLES, **FAN, pixel_size=1.2)
    file = save(tmp_path / "scan.npz", A, angles=np.rad2deg(A.geometry.angles.numpy()), truth=None)
    lengths = ("--source-origin", "30", "--source-detector", "50", "--detector-spacing", "1.7", "--pixel-size", "1.2")
    more = (*lengths, "--angles-unit", "degrees", "--method", "sampled", "--samples", "2", *QUICK, "--tune", "evidence")
    assert main(command(file, tmp_path / "out", *more, geometry="fan")) == 0
    rec = ntkgp.reconstruct(A, A(phantom()), method="sampled", steps=5, rate=1e-2, num_samples=2)
    found = np.load(tmp_path / "out" / "reconstruction.npz")
    assert found["mean"] == pytest.approx(rec.mean[0].numpy(), rel=1e-5, abs=1e-6)
    assert found["std"] == pytest.approx(rec.std[0].numpy(), rel=1e-3)
    assert found["noise"] == pytest.approx(rec.posterior.likelihood.noise.item(), rel=1e-3)
    assert found["samples"].shape == (2, SIZE, SIZE)
    assert not (tmp_path / "out" / "calibration.png").exists()
    said = " ".join(Page((tmp_path / "out" / "index.html").read_text()).words)
    assert "by 2 samples" in said
    assert "noise variance, learnt" in said
    assert "log evidence" not in said
    assert "PSNR" not in said
    assert capsys.readouterr().out == f"{tmp_path}/out/index.html\n"


@pytest.fixture
def small(monkeypatch):
    """Let the command use a small network, and warn of it."""
    library = ntkgp.reconstruct

    def warned(A, y, **options):
        warnings.warn("the network is <small>", stacklevel=2)
        return library(A, y, UNet(channels=2, scales=2, skip=1), **options)

    monkeypatch.setattr(ntkgp, "reconstruct", warned)


def test_warnings_are_told_in_a_line_and_on_the_page(tmp_path, capsys, small):
    main(command(parallel_scan(tmp_path / "scan.npz"), tmp_path / "out", *QUICK))
    assert capsys.readouterr().err == "ntkgp reconstruct: warning: the network is <small>\n"
    assert "the network is &lt;small&gt;" in (tmp_path / "out" / "index.html").read_text()


def test_prior_and_patience_reach_the_library(tmp_path, monkeypatch):
    seen = {}

    def stop(A, y, **options):
        seen.update(options)
        raise ValueError("enough")

    monkeypatch.setattr(ntkgp, "reconstruct", stop)
    more = ("--prior", "iid", "--patience", "7", "--method", "exact", *QUICK)
    with pytest.raises(SystemExit):
        main(command(parallel_scan(tmp_path / "scan.npz"), tmp_path / "out", *more))
    assert (seen["prior"], seen["patience"], seen["method"]) == ("iid", 7, "exact")
    assert "num_samples" not in seen  # the exact method draws without it


def test_a_matrix_that_does_not_factorise_ends_in_one_line(tmp_path, capsys, monkeypatch):
    def fail(A, y, **options):
        raise torch.linalg.LinAlgError("B lost positive definiteness")

    monkeypatch.setattr(ntkgp, "reconstruct", fail)
    told = refused(capsys, command(parallel_scan(tmp_path / "scan.npz"), tmp_path / "out", *QUICK))
    assert told == "ntkgp reconstruct: B lost positive definiteness"


def test_the_readmes_command_is_one(monkeypatch):
    text = (Path(__file__).parent.parent / "README.md").read_text()
    (line,) = re.findall(r"^ntkgp (reconstruct [^#\n]*)", text, re.MULTILINE)
    seen = []
    monkeypatch.setattr("ntkgp.commands.reconstruct.run", lambda args: seen.append(args) or Answer("", {}))
    assert main(shlex.split(line)) == 0
    assert seen[0].geometry == "parallel"


def test_the_documents_commands_are_some(monkeypatch):
    text = (Path(__file__).parent.parent / "docs" / "command_line.md").read_text()
    lines = re.findall(r"^ntkgp ([^#\n]*)", text, re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["demo", "plan", "fit", "tune", "predict", "report"]
    for line in lines:
        seen = []
        run = f"ntkgp.commands.{line.split()[0]}.run"
        monkeypatch.setattr(run, lambda args, seen=seen: seen.append(args) or Answer("", {}))
        assert main(shlex.split(line)) == 0
        assert len(seen) == 1


def test_the_module_is_the_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ntkgp", "reconstruct", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("ntkgp", run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ntkgp reconstruct")


# The folder


def test_earlier_results_stay_unless_asked_and_strangers_stay_always(tmp_path, capsys, small):
    file, out = parallel_scan(tmp_path / "scan.npz"), tmp_path / "out"
    out.mkdir()
    (out / "index.html").write_text("earlier")
    assert refused(capsys, command(file, out, *QUICK)).endswith(f"without --overwrite, but {out} holds index.html")
    assert (out / "index.html").read_text() == "earlier"
    main(command(file, out, *QUICK, "--overwrite"))
    assert "<!DOCTYPE html>" in (out / "index.html").read_text()
    (out / "thesis.tex").write_text("mine")
    assert refused(capsys, command(file, out, *QUICK, "--overwrite")).endswith(f"{out} holds thesis.tex")
    assert (out / "thesis.tex").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["out", "scan.npz"]


def test_a_failure_leaves_everything_as_it_was(tmp_path):
    out = tmp_path / "new" / "out"

    def interrupted():
        with whole_folder(out, ("a",), overwrite=False) as folder:
            (folder / "a").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(out.parent.iterdir()) == []


def test_what_came_meanwhile_stays(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "a").write_text("earlier")

    def overtaken():
        with whole_folder(out, ("a",), overwrite=True) as folder:
            (folder / "a").write_text("later")
            (out / "stranger").write_text("")

    with pytest.raises(ValueError, match="holds stranger"):
        overtaken()
    assert (out / "a").read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [out]


def test_an_empty_folder_will_do(tmp_path):
    with whole_folder(tmp_path / "out", ("a",), overwrite=False) as folder:
        (tmp_path / "out").mkdir()
        (folder / "a").write_text("whole")
    assert (tmp_path / "out" / "a").read_text() == "whole"
    assert os.listdir(tmp_path) == ["out"]


# Bad input


def refused(capsys, argv):
    """Return the one line that a command ends with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(argv)
    told = capsys.readouterr()
    assert end.value.code == 2
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line.startswith("ntkgp")
    return line


NAN = np.full((ANGLES, 12), np.nan)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"sinogram": None}, r"scan.npz must hold sinogram, but holds angles, truth$"),
        ({"angles": None}, r"scan.npz must hold angles, but holds sinogram, truth$"),
        ({"sinogram": np.ones((1, ANGLES, 12))}, r"shape \(angles, detectors\), but has \(1, 4, 12\)"),
        ({"sinogram": np.ones((0, 12))}, r"sinogram must have the shape \(angles, detectors\), but has \(0, 12\)"),
        ({"angles": np.zeros(3)}, r"angles must have the shape \(4,\), one for each row .* but has \(3,\)"),
        ({"angles": np.array([0, 60, 120, 180])}, r"a full turn of 6.283 radians, but span 180: see --angles-unit"),
        ({"truth": np.zeros((9, 9))}, r"truth must have the shape \(8, 8\) of --image-size, but has \(9, 9\)"),
        ({"truth": np.full((8, 8), 2.0)}, r"truth must lie between 0 and 1, but from 2 to 2"),
        ({"sinogram": NAN}, r"sinogram must be finite, but 48 of 48 numbers are not"),
        ({"angles": np.array([0, np.inf, 1, 2])}, r"angles must be finite, but 1 of 4"),
        ({"truth": np.full((8, 8), np.nan)}, r"truth must be finite, but 64 of 64"),
        ({"sinogram": np.full((ANGLES, 12), "x")}, r"sinogram must hold real numbers, but has dtype <U1"),
        ({"sinogram": np.full((ANGLES, 12), None)}, r"scan.npz cannot be read: Object arrays"),
        ({"sinogram": np.ones((ANGLES, 4))}, r"the detector does not see the image's inscribed circle"),
        ({"sinogram": np.full((ANGLES, 12), 50.0)}, r"an image between 0 and 1, whose sum is .* is 2400"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_named(changes, match, tmp_path, capsys):
    file = parallel_scan(tmp_path / "scan.npz", **changes)
    assert re.search(match, refused(capsys, command(file, tmp_path / "out")))
    assert os.listdir(tmp_path) == ["scan.npz"]


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (["--geometry", "fan", "--detector-spacing", "1"], "--geometry fan needs --source-origin"),
        (["--geometry", "fan", "--source-origin", "20"], "--geometry fan needs --detector-spacing"),
        (["--source-detector", "20"], "--source-detector is for --geometry fan, but --geometry is parallel"),
        (["--geometry", "cone"], "--geometry: invalid choice: 'cone'"),
        (["--image-size", "0"], "--image-size: must be positive, but is 0"),
        (["--image-size", "8.5"], "--image-size: invalid int value: '8.5'"),
        (["--noise", "nan"], "--noise: must be positive, but is nan"),
        (["--rate", "inf"], "--rate: must be positive, but is inf"),
        (["--penalty", "-1"], "--penalty: must not be negative, but is -1"),
        (["--tune", "predcp", "--method", "sampled"], "--tune predcp needs a positive --penalty and a --method other"),
        (["--output", "/dev/null"], "--output must be a folder, but /dev/null is a file"),
    ],
)
def test_what_is_wrong_with_an_argument_is_named(more, match, tmp_path, capsys):
    file = parallel_scan(tmp_path / "scan.npz")
    assert match in refused(capsys, command(file, tmp_path / "out", *more))
    assert os.listdir(tmp_path) == ["scan.npz"]


def test_a_file_that_is_not_there_or_not_ours_is_named(tmp_path, capsys):
    missing = command(str(tmp_path / "none.npz"), tmp_path / "out")
    assert refused(capsys, missing) == f"ntkgp reconstruct: file {tmp_path}/none.npz does not exist"
    whole = Path(parallel_scan(tmp_path / "scan.npz"))
    cut = tmp_path / "cut.npz"
    cut.write_bytes(whole.read_bytes()[:300])
    assert refused(capsys, command(str(cut), tmp_path / "out")).endswith(
        "must be an .npz file, but is not, or was cut short"
    )
    damaged = bytearray(whole.read_bytes())
    damaged[200] ^= 255
    cut.write_bytes(damaged)
    assert "cut.npz cannot be read: Bad CRC-32" in refused(capsys, command(str(cut), tmp_path / "out"))


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert re.fullmatch(r"ntkgp \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_command_is_needed(capsys):
    assert refused(capsys, []) == "ntkgp: the following arguments are required: command"
