"""Standard and gap splits of UCI regression (Foong et al. 2019): does uncertainty grow in between the data?

    python benchmarks/reproduce/regression.py --data DIR [--sets energy,naval] [--splits 10] [--out DIR]

A network of one hidden layer of 50 tanh units is trained to its mode (precision 1, noise learnt). Its linearised
posterior has a full covariance, first with the prior and the noise of the training, then with one precision a layer and
the noise by evidence: at the network's own weights, where BNN and GLM have their mean, and at the linear mode for the
refined model. No test or validation data choose anything. Reported is the mean test log likelihood of y in its own
units, for the network alone (MAP), weights sampled into the network (BNN), and the linear model (GLM). Every split is
kept as a JSON file and not run again.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from modes import mlp, train_regression
from sklearn.preprocessing import PolynomialFeatures

import ntkgp

sys.path.insert(0, str(Path(__file__).parent.parent))
from harness import commit, machine

SETS = ("boston", "concrete", "energy", "naval", "wine", "yacht")
METHODS = ("MAP", "BNN", "GLM", "BNN, evidence", "GLM, evidence", "GLM, evidence, refined")
STEPS, PRECISION = 3000, 1.0


def one_split(data: Path, name: str, kind: str, k: int) -> dict:
    """Train, fit, tune and score on split k."""
    with np.load(data / f"uci_regression/{name}.npz") as raw:
        X, y, test = raw["X"], raw["y"], raw[f"{kind}_test_{k}"]
    train = np.setdiff1d(np.arange(len(y)), test)
    mean, std = X[train].mean(0), X[train].std(0)
    X = (X - mean) / np.where(std > 0, std, 1.0)
    centre, scale = y[train].mean(), y[train].std()
    x, t = torch.as_tensor(X).double(), torch.as_tensor((y - centre) / scale).double()[:, None]
    torch.manual_seed(k)
    net = mlp(x.shape[1], 1).double()
    noise = train_regression(net, x[train], t[train], precision=PRECISION, steps=STEPS)
    likelihood = ntkgp.likelihoods.Gaussian(noise)
    post = ntkgp.fit(net, (x[train], t[train]), likelihood, "full", "layerwise", tune=False)
    post.prior.precision = PRECISION
    predictions = {
        "MAP": post.predict(x[test], predictive="map"),
        "BNN": post.predict(x[test], predictive="bnn", num_samples=200),
        "GLM": post.predict(x[test]),
    }
    post.tune(at="map", progress=False)
    predictions["BNN, evidence"] = post.predict(x[test], predictive="bnn", num_samples=200)
    predictions["GLM, evidence"] = post.predict(x[test])
    predictions["GLM, evidence, refined"] = post.tune(progress=False).refine().predict(x[test])
    found = {}
    for method, prediction in predictions.items():
        density = prediction.log_prob(t[test]) - math.log(scale)
        rmse = (prediction.mean - t[test]).square().mean().sqrt().item() * float(scale)
        found[method] = {"log_likelihood": density.mean().item(), "rmse": rmse}
    found["evidence"] = post.log_evidence().item()
    found["noise"] = post.likelihood.noise.item()
    return found


def table(results: dict) -> str:
    """Return mean and standard error of the log likelihoods, and what the bar asks for."""
    lines = ["| set | splits | " + " | ".join(METHODS) + " |", "|---|---|" + "---|" * len(METHODS)]
    means: dict = {}
    for (name, kind), splits in results.items():
        cells = []
        for method in METHODS:
            values = [s[method]["log_likelihood"] for s in splits]
            means[name, kind, method] = statistics.mean(values)
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
            cells.append(f"{statistics.mean(values):.2f} ± {error:.2f}")
        lines.append(f"| {name} | {kind} ({len(splits)}) | " + " | ".join(cells) + " |")
    lines += ["", "Nats lost from standard to gap splits (bar: GLM at most 2 on energy and naval, BNN more):", ""]
    for name in SETS:
        if (name, "gap", "GLM") in means and (name, "standard", "GLM") in means:
            lost = {m: means[name, "standard", m] - means[name, "gap", m] for m in METHODS}
            lost["best constant width"] = means[name, "standard", "GLM"] - constant_width(results[name, "gap"])
            lines.append(f"- {name}: " + ", ".join(f"{m} {v:.2f}" for m, v in lost.items()))
    lines += [
        "",
        "The last is what is lost even if a Gaussian about the network's mean had, in each gap, the one width that",
        "suits its test errors best, −½ log(2πe RMSE²), seen from the GLM on standard splits. Where it is above 2, the",
        "mean is to blame, and only error bars that follow the errors point by point could stay within the bar.",
    ]
    return "\n".join(lines)


def determined(data: Path) -> str:
    """Tell whether a simple model could fill the gaps at all: a control that no error bar enters."""
    lines = [
        "## What the gaps leave to be known",
        "",
        "How many sets of test points the gaps are, as features that rise and fall together leave the same gap; and",
        "the least RMSE, in standard deviations of y, of linear and quadratic ridge regression, degree and penalty",
        "chosen on the test points themselves (split 0 of the standard ones; the middle one of all gaps). The",
        "logarithm of their ratio is what even an honest model of these loses that is at its best in both places.",
        "",
        "| set | gaps | distinct | standard | gap | log ratio |",
        "|---|---|---|---|---|---|",
    ]
    for name in SETS:
        with np.load(data / f"uci_regression/{name}.npz") as raw:
            X, y = raw["X"], raw["y"]
            gaps = [raw[key] for key in raw.files if key.startswith("gap_test_")]
            inside = least_error(X, y, raw["standard_test_0"])
        between = statistics.median(least_error(X, y, test) for test in gaps)
        distinct = len({frozenset(test.tolist()) for test in gaps})
        lines.append(
            f"| {name} | {len(gaps)} | {distinct} | {inside:.3f} | {between:.3f} | {math.log(between / inside):.1f} |"
        )
    return "\n".join(lines)


def least_error(X: np.ndarray, y: np.ndarray, test: np.ndarray) -> float:
    """Return the least test RMSE of ridge regression on linear and quadratic features, in deviations of y."""
    train = np.setdiff1d(np.arange(len(y)), test)
    varies = X[train].std(0) > 1e-9 * np.abs(X[train]).max(0)
    X = (X[:, varies] - X[train][:, varies].mean(0)) / X[train][:, varies].std(0)
    t = (y - y[train].mean()) / y[train].std()
    errors = []
    for degree in (1, 2):
        F = PolynomialFeatures(degree).fit_transform(X)
        H, b = F[train].T @ F[train], F[train].T @ t[train]
        for penalty in 10.0 ** np.arange(-6, 5):
            w = np.linalg.solve(H + penalty * np.eye(len(H)), b)
            errors.append(float(np.sqrt(np.mean((F[test] @ w - t[test]) ** 2))))
    return min(errors)


def constant_width(splits: list[dict]) -> float:
    """Return the highest mean log likelihood of errors of one width about the network's mean."""
    return statistics.mean(-math.log(2 * math.pi * math.e * s["MAP"]["rmse"] ** 2) / 2 for s in splits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--splits", type=int, default=10, help="how many standard splits; of gaps, all")
    parser.add_argument("--out", type=Path, default=Path("docs/results/regression"))
    parser.add_argument("--report", action="store_true", help="run nothing, make the table of what is there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    (args.out / "splits").mkdir(parents=True, exist_ok=True)
    results: dict = {}
    for name in args.sets.split(","):
        for kind in ("standard", "gap"):
            with np.load(args.data / f"uci_regression/{name}.npz") as raw:
                count = sum(key.startswith(f"{kind}_test_") for key in raw.files)
            for k in range(min(args.splits, count) if kind == "standard" else count):
                path = args.out / f"splits/{name}-{kind}-{k}.json"
                if args.report and not path.exists():
                    continue
                if not path.exists():
                    start = time.perf_counter()
                    found = one_split(args.data, name, kind, k) | {"commit": commit()}
                    path.write_text(json.dumps(found) + "\n")
                    print(name, kind, k, f"{time.perf_counter() - start:.0f} s", found["GLM"], found["BNN"], flush=True)
                results.setdefault((name, kind), []).append(json.loads(path.read_text()))
        origin = f"`make reproduce-regression`, tabulated at commit {commit()}, split k with seed k, {machine()}."
        title, about = "In-between uncertainty: UCI regression, standard and gap splits", __doc__.split("\n\n")[2]
        text = f"# {title}\n\n{origin}\n\n{about}\n\n"
        (args.out / "table.md").write_text(f"{text}{table(results)}\n\n{determined(args.data)}\n")
    print((args.out / "table.md").read_text())


if __name__ == "__main__":
    main()
