"""Posteriors beside laplace-torch, in one table.

    python benchmarks/posteriors.py --peers DIR [--data DIR] [--only covariances,gp,large]

``DIR`` holds the peers' environments; ``--data`` the data sets, without which the rows on FashionMNIST are left out.
Each measurement runs in a process of its own, ours and theirs in turn; times are medians over all turns, since the
machine's pace changes from one minute to the next. The table goes to benchmarks/results/posteriors.md, the numbers to
posteriors.json beside it; sections that ``--only`` leaves out stay as they were, each with its commit.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from harness import HERE, Table, commit, median, peak_mb, run_json, write
from kernel import LENET_INNER, MLP_INNER, NETWORKS, lenet
from torch import nn

import ntkgp

SECTIONS = ("covariances", "gp", "large")
STRUCTURES = ("full", "kron", "diag")
SMALL = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3)),
        (4,),
    ),
    "cnn": (
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3, stride=2), nn.Tanh()),
            *(nn.Flatten(), nn.Linear(36, 3)),
        ),
        (1, 9, 9),
    ),
}  # as in peers/laplace_posteriors.py


def gp_problem(case: str, n: int) -> tuple:
    torch.manual_seed(0)
    make, shape = NETWORKS[case]
    x, y = torch.randn(n, *shape), torch.randint(0, 10, (n,))
    lin = ntkgp.Linearization(make(), example=x)
    return lin, ntkgp.priors.Isotropic(lin), (x, y), torch.randn(50, *shape)


def measure_gp(case: str, n: int) -> dict:
    """Seconds to fit, to predict 50 points, and of the bare product and triangular solve of the same shapes."""
    lin, prior, data, x_new = gp_problem(case, n)
    pairs = [(torch.randn(9 * n, d), torch.randn(d, 500)) for d in (MLP_INNER if case == "mlp" else LENET_INNER)]
    root = torch.randn(9 * n, 9 * n)
    L = torch.linalg.cholesky(root @ root.mT / (9 * n) + torch.eye(9 * n))
    found: dict[str, list[float]] = {"fit": [], "predict": [], "bare": []}
    for _ in range(6):
        start = time.perf_counter()
        post = ntkgp.fit(lin, data, "categorical", "function", prior)
        found["fit"].append(time.perf_counter() - start)
        start = time.perf_counter()
        post.latent(x_new)
        found["predict"].append(time.perf_counter() - start)
        start = time.perf_counter()
        K = torch.zeros(9 * n, 500)
        for A, B in pairs:
            K.addmm_(A, B)
        torch.linalg.solve_triangular(L, K, upper=False)
        found["bare"].append(time.perf_counter() - start)
    return {name: times[1:] for name, times in found.items()}  # the first warms up


def measure_covariances(python: str) -> dict:
    """Largest relative differences to laplace-torch's predictive covariances."""
    found = {}
    for case, (make, shape) in SMALL.items():
        for kind in ("categorical", "gaussian"):
            torch.manual_seed(0)
            net, x, x_new = make(), torch.randn(40, *shape), torch.randn(7, *shape)
            y = torch.randint(0, 3, (40,)) if kind == "categorical" else torch.randn(40, 3)
            weights = {name: value.numpy() for name, value in net.state_dict().items()}
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "problem.npz"
                np.savez(path, case=case, X=x, y=y, X_new=x_new, precision=2.0, noise=0.5, **weights)
                theirs = run_json([python, HERE / "peers/laplace_posteriors.py", "covariances", path], f"{case} {kind}")
            lin = ntkgp.Linearization(net, example=x)
            likelihood = ntkgp.likelihoods.Gaussian(0.5) if kind == "gaussian" else kind
            for structure in STRUCTURES:
                post = ntkgp.fit(lin, (x, y), likelihood, structure, ntkgp.priors.Isotropic(lin, 2.0))
                ours = post.latent(x_new).covariance_matrix
                difference = (ours - torch.tensor(theirs[structure])).abs().max() / ours.abs().max()
                found[f"{case} {kind} {structure}"] = difference.item()
    return {"differences": found}


def measure_large(data: str, size: int, tests: int) -> dict:
    """Fit M points of FashionMNIST with a LeNet trained for one epoch, and predict the test images."""
    train, test = fashion(Path(data), "train"), fashion(Path(data), "test")
    torch.manual_seed(0)
    net = lenet()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, weight_decay=1e-4)
    for index in torch.randperm(len(train[0])).split(128):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(train[0][index]), train[1][index]).backward()
        optimizer.step()
    lin = ntkgp.Linearization(net, example=train[0][:2])
    prior = ntkgp.priors.Isotropic(lin, 10.0)
    subset = ntkgp.posteriors.subsets.Stratified(size)
    start = time.perf_counter()
    post = ntkgp.fit(lin, train, "categorical", "function", prior, subset=subset)
    fitted = time.perf_counter()
    prediction = post.predict(test[0][:tests])
    end = time.perf_counter()
    y = test[1][:tests]
    metrics = ntkgp.report.metrics
    mean = post.predict(test[0][:tests], predictive="map")
    return {
        "fit": fitted - start,
        "predict": end - fitted,
        "nll": metrics.negative_log_likelihood(prediction, y),
        "nll map": metrics.negative_log_likelihood(mean, y),
        "accuracy": metrics.accuracy(prediction.probs, y),
    }


def fashion(data: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images in [0, 1], (N, 1, 28, 28), and labels."""
    with np.load(data / "images/fashion_mnist.npz") as raw:
        x, y = raw[f"x_{part}"], raw[f"y_{part}"]
    return torch.as_tensor(x).float().div(255).unsqueeze(1), torch.as_tensor(y).long()


MEASUREMENTS = {"gp": measure_gp, "covariances": measure_covariances, "large": measure_large}


def child(name: str, *arguments: object) -> dict:
    """Run one measurement in a process of its own."""
    command = [sys.executable, __file__, "--measure", name, *map(str, arguments)]
    return run_json(command, f"ours: {name} {' '.join(map(str, arguments[1:] if name == 'large' else arguments))}")


def covariances(peers: Path) -> dict:
    return child("covariances", peers / "laplace/bin/python")


def processes(peers: Path) -> dict:
    """Times of ours and of laplace-torch's, in turn: neighbours on the machine slow down one or the other."""
    found: dict[str, list[dict]] = {}
    for case, rounds in (("lenet", 5), ("mlp", 3)):
        command = [peers / "laplace/bin/python", HERE / "peers/laplace_posteriors.py", "gp", "--case", case]
        for _ in range(rounds):
            found.setdefault(f"ours {case}", []).append(child("gp", case, 400))
            theirs = run_json([*command, "--n", "400", "--repeats", "2", "--threads", "2"], f"laplace-torch: gp {case}")
            found.setdefault(f"laplace-torch {case}", []).append(theirs)
        found[f"ours {case}"].append(child("gp", case, 400))
    return found


def tabulate(raw: dict) -> Table:
    table = Table()
    if "covariances" in raw:
        for structure in STRUCTURES:
            pairs = raw["covariances"]["differences"].items()
            worst, value = max(((name, v) for name, v in pairs if name.endswith(structure)), key=lambda pair: pair[1])
            what = f"predictive covariance, {structure}, against laplace-torch, relative difference"
            table.at_most(what, value, 1e-3, f"worst: {worst}", ".1e")
    for case, bar_fit, bar_predict in (("lenet", 15, 12), ("mlp", 150, 100)) if "gp" in raw else ():
        ours, theirs = raw["gp"][f"ours {case}"], raw["gp"][f"laplace-torch {case}"]
        fit, predict, bare = (median([t for part in ours for t in part[name]]) for name in ("fit", "predict", "bare"))
        for name, mine, bar in (("fit", fit, bar_fit), ("predict", predict, bar_predict)):
            his = median([t for part in theirs for t in part[name]])
            turns = [median(b[name]) / median(a[name]) for a, b in zip(ours, theirs, strict=False)]
            detail = f"{his:.2f} s against {mine:.3f} s; turns {min(turns):.1f} to {max(turns):.1f}"
            table.at_least(f"GP, M = 400, {case}: {name}, against laplace-torch", his / mine, bar, detail)
        detail = f"{1e3 * predict:.0f} ms against {1e3 * bare:.0f} ms"
        what = f"GP, M = 400, {case}: predict 50 points, over the bare product and solve"
        table.at_most(what, predict / bare, 1.5, detail)
    if "large" in raw:
        large, what = raw["large"], "GP, M = 3200, LeNet on FashionMNIST"
        table.at_most(f"{what}: peak memory, GB", large["peak_mb"] / 1024, 14, "whole process")
        table.note(
            f"{what}: minutes to fit, and for 10,000 predictions",
            f"{large['fit'] / 60:.1f}, {large['predict'] / 60:.1f}",
        )
        table.note(
            f"{what}: test NLL, GP and MAP",
            f"{large['nll']:.3f}, {large['nll map']:.3f} (one epoch, prior precision 10)",
        )
    table.note("commits", ", ".join(f"{name} {raw[name]['commit']}" for name in SECTIONS if name in raw))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with the peers' environments")
    parser.add_argument("--data", type=Path, help="folder with the data sets")
    parser.add_argument("--only", default=",".join(SECTIONS), help="which sections to measure")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        name, *rest = args.measure
        result = MEASUREMENTS[name](*(int(a) if a.isdigit() else a for a in rest))
        print(json.dumps(result | {"peak_mb": peak_mb()}))
        return
    if args.peers is None:
        parser.error("--peers is needed")
    start, results = time.perf_counter(), HERE / "results/posteriors.json"
    before = json.loads(results.read_text()) if results.exists() else {}
    raw, wanted = {name: before[name] for name in SECTIONS if name in before}, args.only.split(",")
    for name in wanted:
        if name == "large" and args.data is None:
            continue
        origin = commit()
        if name == "large":
            found = child("large", args.data.absolute(), 3200, 10000)
        else:
            found = (covariances if name == "covariances" else processes)(args.peers.absolute())
        raw[name] = found | {"commit": origin}
    write("posteriors", "make bench-posteriors", "Posteriors beside laplace-torch", tabulate(raw), raw, start)


if __name__ == "__main__":
    main()
