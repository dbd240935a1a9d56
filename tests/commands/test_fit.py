"""``ntkgp fit``, ``tune`` and ``predict``: real processes on real files against the library itself."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr
from dataclasses import asdict
from functools import partial
from io import StringIO

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

import ntkgp
from ntkgp.cli import main
from ntkgp.commands.folder import whole_file
from ntkgp.report.scores import mean_of

NETWORKS = """
import time
from pathlib import Path
from torch import nn

def make_net():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))

def other_activation():
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))

def smaller():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3))

def deeper():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))

def no_module():
    return "a network"

def broken():
    return {}["missing"]

class Slow(nn.Sequential):
    def forward(self, x):
        Path("running").touch()
        time.sleep(0.2)
        return super().forward(x)

def slow():
    return Slow(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))

def regression():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

made = make_net()
"""
MODEL = ("--weights", "w.safetensors", "--data", "d.npz", "--likelihood", "categorical")
FIT = ("fit", "cli_networks:make_net", *MODEL)


def make_net(outputs=3):
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs))


def ntkgp_process(*words, cwd):
    """Run ``ntkgp`` as a user does."""
    return subprocess.run([sys.executable, "-m", "ntkgp", *words], cwd=cwd, capture_output=True, text=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with networks, weights, data, and a posterior that a process fitted."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "cli_networks.py").write_text(NETWORKS)
    generator = torch.Generator().manual_seed(0)
    X, y = torch.randn(30, 2, generator=generator), torch.randint(3, (30,), generator=generator)
    torch.manual_seed(1)
    save_model(make_net(), str(folder / "w.safetensors"))
    save_model(make_net(1), str(folder / "w1.safetensors"))
    np.savez(folder / "d.npz", X=X.numpy(), y=y.numpy())
    np.savez(folder / "r.npz", X=X.double().numpy(), y=y.numpy())  # whole numbers, to be regressed upon
    np.savez(folder / "x.npz", X=torch.randn(7, 2, generator=generator).numpy(), y=np.arange(7) % 3)
    done = ntkgp_process(*FIT, "--prior", "layerwise", "--json", "-o", "post", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    (folder / "told.json").write_text(done.stdout)
    return folder


@pytest.fixture
def here(place, tmp_path, monkeypatch):
    """Work in a copy of that folder."""
    copy = tmp_path / "here"
    shutil.copytree(place, copy)
    monkeypatch.chdir(copy)
    monkeypatch.delitem(sys.modules, "cli_networks", raising=False)
    return copy


def data(path, dtype=torch.float32):
    arrays = np.load(path)
    return torch.as_tensor(arrays["X"]).to(dtype), torch.as_tensor(arrays["y"])


def network(path):
    net = make_net()
    net.load_state_dict(load_file(path))
    return net


def test_the_process_fits_what_the_library_fits(place):
    told = json.loads((place / "told.json").read_text())
    post = ntkgp.fit(network(place / "w.safetensors"), data(place / "d.npz"), "categorical", prior="layerwise")
    assert told["method"] == post.method == "full"
    assert told["reason"] == post.reason
    assert told["log_evidence"] == pytest.approx(post.history[-1]["log_evidence"], rel=1e-4)
    assert told["precision"] == pytest.approx(post.prior.precision.tolist(), rel=1e-2)
    assert (told["num_data"], told["num_params"], told["num_outputs"]) == (30, 27, 3)
    x = data(place / "x.npz")[0]
    saved = ntkgp.load(place / "post", network(place / "w.safetensors"))  # the folder is one of the library's
    assert torch.allclose(saved.predict(x).probs, post.predict(x).probs, atol=1e-3)


def test_a_process_predicts_what_the_library_predicts(here):
    done = ntkgp_process("predict", "post/", "x.npz", "-o", "out.csv", cwd=here)
    assert (done.returncode, done.stderr) == (0, "")
    x, y = data("x.npz")
    prediction = ntkgp.load("post", network("w.safetensors")).predict(x)
    with open("out.csv") as file:
        header, *lines = csv.reader(file)
    table = np.array(lines, dtype=float)
    columns = {name: table[:, [header.index(c) for c in header if c.rpartition("_")[0] == name]] for name in ("probs",)}
    assert columns["probs"] == pytest.approx(prediction.probs.numpy(), abs=1e-6)
    for name in ("entropy", "log_prob", "label"):
        expected = {
            "entropy": prediction.entropy,
            "log_prob": prediction.log_prob(y),
            "label": prediction.probs.argmax(1),
        }
        assert table[:, header.index(name)] == pytest.approx(expected[name].numpy(), abs=1e-5)
    assert header[3:6] == ["epistemic_0", "epistemic_1", "epistemic_2"]
    assert table[:, 3:6] == pytest.approx(prediction.epistemic.numpy(), abs=1e-6)
    assert str(mean_of(-prediction.log_prob(y).double())) in done.stdout
    main(["predict", "post", "x.npz", "-o", "out.npz", "--predictive", "map", "--seed", "3"])
    assert np.load("out.npz")["probs"] == pytest.approx(
        network("w.safetensors")(x).softmax(1).detach().numpy(), abs=1e-6
    )


def test_links_in_closed_form_tell_no_parts_of_the_variance(here):
    main(["predict", "post", "x.npz", "-o", "out.npz", "--link", "probit"])
    found = np.load("out.npz")
    assert list(found) == ["probs", "standard_error", "entropy", "label", "log_prob"]
    x = data("x.npz")[0]
    expected = ntkgp.load("post", network("w.safetensors")).predict(x, link="probit").probs
    assert found["probs"] == pytest.approx(expected.numpy(), abs=1e-6)


def test_a_process_tunes_in_place(here):
    assert main([*FIT, "--no-tune", "-o", "untuned"]) == 0
    before = ntkgp.load("untuned", network("w.safetensors"))
    assert before.prior.precision.item() == pytest.approx(1)
    done = ntkgp_process("tune", "untuned", "--json", cwd=here)
    assert (done.returncode, done.stderr) == (0, "")
    after = ntkgp.load("untuned", network("w.safetensors"))
    assert after.prior.precision.tolist() == pytest.approx(before.tune().prior.precision.tolist(), rel=1e-2)
    assert json.loads(done.stdout)["precision"] == pytest.approx(after.prior.precision.tolist(), rel=1e-6)
    assert len(after.history) > 0
    assert sorted(os.listdir("untuned")) == [
        "network.json",
        "posterior.json",
        "tensors.safetensors",
        "weights.safetensors",
    ]


def test_tuning_on_validation_data_may_go_elsewhere(here, capsys):
    main(["tune", "post", "--validation", "x.npz", "-o", "validated"])
    capsys.readouterr()
    validated = ntkgp.load("validated", network("w.safetensors"))
    post = ntkgp.load("post", network("w.safetensors")).tune(validation=data("x.npz"))
    assert validated.prior.precision.tolist() == pytest.approx(post.prior.precision.tolist(), rel=1e-5)
    main(["tune", "post", "--validation", "x.npz", "--temperatures", "0.5", "3", "-o", "cooler", "--json"])
    told = json.loads(capsys.readouterr().out)
    post = ntkgp.load("post", network("w.safetensors")).tune(validation=data("x.npz"), temperatures=[0.5, 3.0])
    assert told["temperature"] == pytest.approx(post.likelihood.temperature.item())
    best = max(step.get("validation_log_prob", -9e9) for step in post.history)
    assert told["validation_log_prob"] == pytest.approx(best, rel=1e-4)
    assert "temperatures: for validation data to choose from" in refused(["tune", "post", "--temperatures", "2"])
    assert refused(["tune", "post", "--validation", "x.npz", "--at", "map"]).endswith(
        "--at is for tuning by evidence, but --validation is given"
    )


def test_options_dtype_and_seed_reach_the_library(here, capsys):
    words = ["fit", "cli_networks:regression", "--weights", "w1.safetensors", "--data", "r.npz"]
    words += ["--likelihood", "gaussian", "--dtype", "float64", "--method", "function", "--option", "subset=9"]
    main([*words, "--seed", "5", "-o", "post1", "--json"])
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert said.err.startswith("ntkgp fit: warning: the mode of the linear model")
    assert (told["method"], told["num_data"], told["num_outputs"]) == ("function", 9, 1)
    net = make_net(1)
    net.load_state_dict(load_file("w1.safetensors"))
    X, y = data("r.npz", torch.float64)
    subset = ntkgp.posteriors.subsets.Random(9, seed=5)
    with pytest.warns(UserWarning, match="the mode of the linear model gains") as warned:
        post = ntkgp.fit(net.double(), (X, y.double()), "gaussian", "function", subset=subset)
    assert told["warnings"] == [str(warning.message) for warning in warned]
    assert told["noise"] == pytest.approx(post.likelihood.noise.item(), rel=1e-5)
    main(["predict", "post1", "r.npz", "-o", "out.npz"])
    found, expected = np.load("out.npz"), post.predict(X)
    assert found["mean"] == pytest.approx(expected.mean.detach().numpy(), rel=1e-6)
    for name in ("variance", "epistemic", "aleatoric", "entropy"):
        assert found[name] == pytest.approx(getattr(expected, name).detach().numpy(), rel=1e-4)
    assert list(found) == ["mean", "variance", "epistemic", "aleatoric", "standard_error", "entropy", "log_prob"]
    main(["predict", "post1", "r.npz", "-o", "drawn.npz", "--predictive", "bnn"])
    assert list(np.load("drawn.npz")) == ["mean", "variance", "epistemic", "aleatoric", "standard_error", "log_prob"]


def test_the_plan_is_the_librarys(here, capsys):
    main(["plan", *FIT[1:], "--inducing", "5", "--json"])
    told = json.loads(capsys.readouterr().out)
    plan = ntkgp.plan(network("w.safetensors"), data("d.npz"), "categorical", num_inducing=5)
    assert {name: found["kept"] for name, found in told["methods"].items()} == {c.method: c.kept for c in plan.costs}
    assert (told["auto"], told["reason"]) == (plan.chosen, plan.reason)
    main(["plan", *FIT[1:]])
    assert "estimates for this machine" in capsys.readouterr().out


def test_a_report_is_the_librarys(here):
    words = ["report", "post", "--test", "x.npz", "--ood", "d.npz", "-o", "report.html", "--title", "<T>"]
    done = ntkgp_process(*words, "--json", cwd=here)
    assert (done.returncode, done.stderr) == (0, "")
    post = ntkgp.load("post", network("w.safetensors"))
    found = ntkgp.report.report(post, data("x.npz"), data("d.npz")[0], title="<T>")
    told = json.loads(done.stdout)
    assert told["scores"]["NLL"]["after"] == pytest.approx(asdict(found.scores["NLL"].after), rel=1e-5)
    assert told["detection"]["entropy"] == pytest.approx(asdict(found.detection["entropy"]), rel=1e-5)
    page = (here / "report.html").read_text()
    assert "<title>&lt;T&gt;</title>" in page
    assert f"<td>{found.scores['NLL'].after}</td>" in page
    assert refused(words).endswith("--output must be new without --overwrite, but report.html exists")
    assert "short.npz must hold y, but holds X" in refused(
        ["report", "post", "--test", no_targets(here), "-o", "r.html"]
    )


def no_targets(folder):
    np.savez(folder / "short.npz", X=np.zeros((2, 2)))
    return "short.npz"


def test_ctrl_c_leaves_no_trace(here):
    before = sorted(os.listdir(here))
    words = ["fit", "cli_networks:slow", *MODEL, "-o", "new/post"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # shells start background jobs deaf to it
    with subprocess.Popen(
        [sys.executable, "-m", "ntkgp", *words], cwd=here, stderr=subprocess.PIPE, text=True, preexec_fn=heard
    ) as process:
        while not (here / "running").exists() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        told = process.stderr.read()
    assert told == "ntkgp fit: interrupted; nothing was written\n"
    assert process.returncode == 130
    (here / "running").unlink()
    assert sorted(os.listdir(here)) == before


def test_a_file_is_whole_or_not_there(tmp_path):
    def interrupted():
        with whole_file(tmp_path / "a.csv", overwrite=True) as file:
            file.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == []
    with whole_file(tmp_path / "a.csv", overwrite=True) as file:
        file.write_text("whole")
    assert (tmp_path / "a.csv").read_text() == "whole"


# Bad input


def refused(words, code=2):
    """Return the last line on stderr that a command ends with; nothing is written."""
    before, said = sorted(os.listdir()), StringIO()
    with redirect_stderr(said), pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == code
    assert sorted(os.listdir()) == before
    *more, line = said.getvalue().splitlines()
    assert more == [] or "--traceback" in words
    print(*more, sep="\n")
    return line


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--weights", "none.safetensors"], "ntkgp fit: weights: file none.safetensors does not exist"),
        (["--weights", "d.npz"], "d.npz must be a safetensors file, but is not, or was cut short"),
        (["--data", "none.npz"], "ntkgp fit: file none.npz does not exist"),
        (["--data", "w.safetensors"], "w.safetensors must be an .npz file, but is not"),
        (["--data", "keys.npz"], "keys.npz must hold X, but holds inputs, y"),
        (["--data", "short.npz"], "short.npz: y must hold a target for each of 30 points of X, but has shape (29,)"),
        (["--data", "wide.npz"], "wide.npz: the network cannot take a point of X, which has shape (5,)"),
        (["--data", "empty.npz"], "X must hold at least one point, but has shape (0, 2)"),
        (["--data", "nan.npz"], "X must be finite, but 1 of 60 numbers are not"),
        (["--data", "classes.npz"], "y must hold classes from 0 to 2, but has values from 0 to 3"),
        (["--likelihood", "gaussian"], "y must hold 3 values for each point"),
        (["--option", "rank"], "must be KEY=VALUE, but is 'rank'"),
        (["--option", "prior=x"], "prior has an argument of its own"),
        (["--method", "kron", "--option", "rank=3"], "method 'kron' does not take 'rank'"),
        (["-o", "w.safetensors"], "--output must be a folder, but w.safetensors is a file"),
        (["-o", "post"], "--output must be new or empty without --overwrite, but post holds network.json"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(words, match, here):
    X, y = (part.numpy() for part in data("d.npz"))
    changed = {
        "wide": (np.ones((30, 5)), y),
        "short": (X, y[1:]),
        "empty": (X[:0], y[:0]),
        "classes": (X, np.arange(30) % 4),
    }
    changed |= {"nan": (np.where(np.arange(60).reshape(30, 2) == 7, np.nan, X), y)}
    for name, (inputs, targets) in changed.items():
        np.savez(f"{name}.npz", X=inputs, y=targets)
    np.savez("keys.npz", inputs=X, y=y)
    assert match in refused([*FIT, "-o", "out", *words])


@pytest.mark.parametrize(
    ("network", "match"),
    [
        ("nowhere.at_all:make_net", "nowhere.at_all cannot be imported, neither from"),
        ("cli_networks", "network must be given as package.module:make_net, but is 'cli_networks'"),
        ("cli_networks:absent", "a function that returns the network, but cli_networks has nothing of that name"),
        ("cli_networks:made", "must be a function that returns the network, but cli_networks has a Sequential"),
        ("cli_networks:no_module", "cli_networks:no_module() must return a torch.nn.Module, but returns a str"),
        ("cli_networks:broken", "cli_networks:broken() failed: KeyError: 'missing'"),
        ("cli_networks:smaller", "size mismatch for 0.weight"),
        ("cli_networks:deeper", "w.safetensors does not fit cli_networks:deeper: it lacks 4.bias, 4.weight"),
    ],
)  # fmt: skip
def test_a_network_that_cannot_be_made_is_named(network, match, here):
    assert match in refused(["fit", network, *MODEL, "-o", "out"])


def test_a_network_whose_code_was_changed_is_noticed(here):
    meta = json.loads((here / "post" / "network.json").read_text())
    (here / "post" / "network.json").write_text(json.dumps(meta | {"network": "cli_networks:other_activation"}))
    told = refused(["predict", "post", "x.npz", "-o", "out.npz"])
    assert "cli_networks:other_activation makes another network than it did" in told


def test_a_posterior_that_was_tampered_with_is_noticed(here):
    weights = load_file("post/weights.safetensors")
    save_file({name: 2 * value for name, value in weights.items()}, "post/weights.safetensors")
    assert "weights.safetensors is not the file that was written" in refused(
        ["predict", "post", "x.npz", "-o", "out.npz"]
    )
    (here / "post" / "weights.safetensors").unlink()
    assert "weights.safetensors does not exist" in refused(["tune", "post"])
    (here / "post" / "network.json").write_text("{}")
    assert "network.json was cut short: it lacks dtype" in refused(["tune", "post"])
    assert "folder none does not exist" in refused(["tune", "none"])
    assert "is not a folder that ntkgp fit wrote" in refused(["tune", "."])


def test_predictions_refuse_what_they_cannot_do(here):
    (here / "out.csv").write_text("mine")
    assert refused(["predict", "post", "x.npz", "-o", "out.csv"]).endswith("without --overwrite, but out.csv exists")
    assert refused(["predict", "post", "x.npz", "-o", "out.txt"]).endswith("must end in .npz or .csv, but is out.txt")
    assert refused(["predict", "post", "x.npz", "-o", "post.csv", "--link", "x"]).count("invalid choice")
    main(["predict", "post", "x.npz", "-o", "out.csv", "--overwrite"])
    assert (here / "out.csv").read_text().startswith("probs_0,")


def test_a_traceback_is_shown_if_asked(here, capsys, monkeypatch):
    told = refused(["fit", "cli_networks:broken", *MODEL, "-o", "out", "--traceback"])
    assert "failed: KeyError" in told
    assert 'return {}["missing"]' in capsys.readouterr().out
    monkeypatch.setattr("ntkgp.fit", lambda *args, **options: {}["bug"])
    told = refused([*FIT, "-o", "out"], code=1)
    assert told == "ntkgp fit: KeyError: 'bug' (--traceback shows where)"
