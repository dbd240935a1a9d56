"""Variational Laplace beside mean-field VI and MAP: Table 1 and Fig. 2 of Unlu & Aitchison (2021).

    python benchmarks/reproduce/variational_laplace.py --data DIR [--small] [--report] [--only fashion_mnist]

A softplus network with batch normalisation, as the paper's has it, is trained on the same images by each objective,
with the weights' prior N(0, 2/fan-in) tempered by β: a CNN on FashionMNIST, a preactivation ResNet on a part of
CIFAR-10. β is chosen by the NLL on validation images that were not trained on. As MAP overfits where others do not, it
is also trained for fewer epochs and with stronger priors, and these are chosen likewise. Settings stand in
training.json. One JSON a run is kept under ``--out``, and what is there is not run again; runs that are stopped go on
from ``--cache``. The same command in two processes shares the work between them.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from softplus_networks import NETWORKS
from torch import Tensor, nn

from ntkgp.report import metrics
from ntkgp.training import MaximumAPosteriori, MeanFieldVI, VariationalLaplace

sys.path.insert(0, str(Path(__file__).parent.parent))
from harness import kept
from images import images
from settings import claimed, command_line, mean_and_error

mpl.use("Agg")
DATA = {"fashion_mnist": "FashionMNIST", "cifar10": "CIFAR-10, a part"}
FILES = {"cifar10": "cifar10_part"}
_SECONDS = {  # to see that all runs
    "train": 300, "validation": 100, "test": 200, "seeds": [0, 1], "betas": [1.0, 0.1], "epochs": 2,
    "fewer epochs": [1], "stronger": [3.0], "other rates": [3.0],
}  # fmt: skip
SMALL = {"fashion_mnist": _SECONDS, "cifar10": _SECONDS | {"seeds": [0]}}
OBJECTIVES: dict[str, Callable] = {"MAP": MaximumAPosteriori, "VI": MeanFieldVI, "VL": VariationalLaplace}
PAPER = {  # a PreactResNet-18 on all images
    "fashion_mnist": {
        "VL": (0.16, 0.946, 0.010),
        "VI (mean)": (0.23, 0.940, 0.034),
        "VI (10 samples)": (0.29, 0.936, 0.016),
        "MAP": (0.29, 0.936, 0.096),
    },
    "cifar10": {
        "VL": (0.23, 0.924, 0.017),
        "VI (mean)": (0.37, 0.911, 0.053),
        "VI (10 samples)": (0.35, 0.902, 0.044),
        "MAP": (0.43, 0.908, 0.058),
    },
}
ROWS = {"VL": "VL", "VI (mean)": "VI", "VI (10 samples)": "VI", "MAP": "MAP"}  # row -> whose runs
SCORES = {"nll": 3, "accuracy": 4, "ece": 4}  # and their digits
TUNED = "MAP, among more β and fewer epochs"
FALLS = 0.7, 0.9  # of all epochs, where learning rates fall


def scales(net: nn.Module) -> dict[str, float]:
    """Return s of every layer: √(2 / fan-in), and 1 for the scales and shifts of a normalisation."""
    layers = {name: module.weight[0].numel() for name, module in net.named_modules() if hasattr(module, "weight")}
    return {name: math.sqrt(2 / fan_in) if fan_in > 1 else 1.0 for name, fan_in in layers.items()}


class Split:
    """Training, validation and test images, standardised, the same for every seed."""

    def __init__(self, data: Path, name: str, S: dict) -> None:
        x, y = images(data, FILES.get(name, name), "train")
        x_test, y_test = images(data, FILES.get(name, name), "test")
        centre, scale = x.mean(), x.std()
        x, x_test = (x - centre) / scale, (x_test - centre) / scale
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        parts = order[: S["train"]], order[S["train"] : S["train"] + S["validation"]]
        self.train, self.validation = ((x[i], y[i]) for i in parts)
        self.test = x_test[: S["test"]], y_test[: S["test"]]


def scored(probs: Tensor, y: Tensor) -> dict[str, float]:
    nll = -probs[torch.arange(len(y)), y].clamp(min=1e-12).log().mean().item()
    return {"nll": nll, "accuracy": metrics.accuracy(probs, y), "ece": metrics.expected_calibration_error(probs, y)}


def one(split: Split, S: dict, cache: Path, method: str, beta: float, rate: float, seed: int, epochs: int) -> dict:
    """Train once, and score on validation and test images."""
    torch.manual_seed(seed)
    net = NETWORKS[S["network"]]()
    options = {} if method == "MAP" else {"log_sigma_rate": rate}
    objective = OBJECTIVES[method](net, "categorical", prior_std=scales(net), beta=beta, seed=seed, **options)
    falls = [int(part * epochs) for part in FALLS]
    training = {"batch_size": S["batch"], "lr": S["lr"], "milestones": falls, "progress": False}
    checkpoint = cache / name(S, method, beta, rate, seed, epochs)
    post = objective.fit(split.train, epochs, checkpoint=checkpoint, **training)
    ways = {"map": {"predictive": "map"}}
    if method == "VI":
        ways["samples"] = {"predictive": "bnn", "num_samples": S["samples"]}
    found: dict = {"method": method, "beta": beta, "rate": rate, "elbo": [-e["loss"] for e in objective.history]}
    found["epochs"], found["parameters"] = epochs, sum(p.numel() for p in net.parameters())
    for which in ("validation", "test"):
        x, y = getattr(split, which)
        found[which] = {way: scored(post.predict(x, progress=False, **how).probs, y) for way, how in ways.items()}
    return found


def name(S: dict, method: str, beta: float, rate: float, seed: int, epochs: int) -> str:
    fewer = "" if epochs == S["epochs"] else f"-epochs{epochs}"
    return f"variational-{S['data']}-{method}-beta{beta:g}-rate{rate:g}{fewer}-{seed}"


def runs(S: dict) -> Iterator[tuple[str, float, float, int, int]]:
    """Yield method, β, multiplier of log σ's rate, seed, and epochs."""
    for seed in S["seeds"]:
        for beta in S["betas"]:
            for method in OBJECTIVES:
                yield method, beta, S["rate"], seed, S["epochs"]
            for epochs in S["fewer epochs"]:
                yield "MAP", beta, S["rate"], seed, epochs
    for seed in S["rates at"]["seeds"]:
        for beta in S["rates at"]["betas"]:
            for rate in S["other rates"]:
                yield from ((method, beta, rate, seed, S["epochs"]) for method in ("VI", "VL"))
    for seed in S["seeds"]:
        for beta in S["stronger"]:
            for epochs in (*S["fewer epochs"], S["epochs"]):
                yield "MAP", beta, S["rate"], seed, epochs


# The report


def report(out: Path, settings: dict) -> str:
    lines = ["# Variational Laplace", ""]
    for data, title in DATA.items():
        found = [json.loads(path.read_text()) for path in sorted(out.glob(f"variational-{data}-*.json"))]
        if found:
            lines += [f"## {title}", "", *section(out, settings[data], found)]
    text = "\n".join(lines)
    (out / "variational_laplace.md").write_text(text)
    return text


def section(out: Path, S: dict, found: list[dict]) -> list[str]:
    """Return the lines of one data set, and draw its figures."""
    paper = PAPER[S["data"]]
    whole = [run for run in found if run.get("epochs", S["epochs"]) == S["epochs"]]
    main = [run for run in whole if run["rate"] == S["rate"]]
    lines = [_origin(found, S), ""]
    lines += ["| | β, by validation NLL | test NLL | accuracy | ECE |", "|---|---|---|---|---|"]
    for row, method in ROWS.items():
        way, beta = "samples" if "samples" in row else "map", best(main, row, S)
        cells = []
        for i, (key, digits) in enumerate(SCORES.items()):
            values = [run["test"][way][key] for run in main if run["method"] == method and run["beta"] == beta]
            cells.append(f"{mean_and_error(values, digits)} ({paper[row][i]:g})")
        lines.append(f"| {row} | {beta:g} | " + " | ".join(cells) + " |")
    lines += tuned_row([run for run in found if run["method"] == "MAP"], S)
    lines += ["", "In brackets: the paper's, a PreactResNet-18 on all training images.", ""]
    figures = {"by β": (f"variational_laplace_{S['data']}.png", draw_betas, main)}
    if S["rates at"]["betas"]:
        figures["by rate"] = (f"variational_laplace_{S['data']}_rates.png", draw_rates, whole)
    for what, (file, draw, some) in figures.items():
        draw(out / file, some, S)
        lines += [f"![{what}]({file})", ""]
    return lines


def tuned_row(found: list[dict], S: dict) -> list[str]:
    """Return the row of MAP with β and epochs by validation, from all its runs."""
    settings: dict[tuple[float, int], list[dict]] = {}
    for run in found:
        settings.setdefault((run["beta"], run.get("epochs", S["epochs"])), []).append(run)
    (beta, epochs), chosen = min(settings.items(), key=lambda item: _mean(item[1], "validation", "nll"))
    cells = [mean_and_error([run["test"]["map"][key] for run in chosen], d) for key, d in SCORES.items()]
    return [f"| {TUNED} ({epochs}) | {beta:g} | " + " | ".join(cells) + " |"]


def _mean(some: list[dict], which: str, key: str, way: str = "map") -> float:
    return sum(run[which][way][key] for run in some) / len(some) if some else math.inf


def _origin(found: list[dict], S: dict) -> str:
    commits = ", ".join(sorted({run["commit"] for run in found}))
    what = f"a {S['title']} of {found[0]['parameters']} parameters, {S['train']} training images, {S['epochs']} epochs"
    cost = f"{len(found)} runs, {sum(run['minutes'] for run in found):.0f} minutes"
    return (
        f"`make reproduce-training`: {what}, seeds {S['seeds']}; {cost}; {found[0]['machine']}, commits {commits}. "
        "Means ± standard errors over seeds."
    )


def best(main: list[dict], row: str, S: dict) -> float:
    """Return β with the smallest mean NLL on validation images."""
    way = "samples" if "samples" in row else "map"

    def nll(beta: float) -> float:
        return _mean([r for r in main if r["method"] == ROWS[row] and r["beta"] == beta], "validation", "nll", way)

    return min(S["betas"], key=nll)


def draw_betas(path: Path, main: list[dict], S: dict) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.6), layout="constrained")
    for ax, (key, label) in zip(axes, (("nll", "NLL"), ("accuracy", "accuracy"), ("ece", "ECE")), strict=True):
        for row, method in ROWS.items():
            way = "samples" if "samples" in row else "map"
            by_beta = {
                b: [r["test"][way][key] for r in main if r["method"] == method and r["beta"] == b] for b in S["betas"]
            }
            points = {b: sum(v) / len(v) for b, v in by_beta.items() if v}
            ax.plot(list(points), list(points.values()), "o-", ms=3, label=row)
        ax.set(xscale="log", xlabel="β", ylabel=f"test {label}")
    axes[-1].legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_rates(path: Path, found: list[dict], S: dict) -> None:
    """Draw the bound along training, and bound and NLL at its end, by the multiplier of log σ's learning rate."""
    betas = [b for b in S["rates at"]["betas"] if any(r["beta"] == b for r in found)]
    figure, axes = plt.subplots(len(betas), 4, figsize=(11, 2.4 * len(betas)), layout="constrained", squeeze=False)
    for line, beta in zip(axes, betas, strict=True):
        some = [r for r in found if r["beta"] == beta and f"-{S['rates at']['seeds'][0]}" == f"-{r['seed']}"]
        for column, method in enumerate(("VI", "VL")):
            mine = sorted((r for r in some if r["method"] == method), key=lambda r: r["rate"])
            for shade, run in enumerate(mine):
                line[column].plot(run["elbo"], color=plt.cm.viridis(shade / 4), label=f"x{run['rate']:g}")
            line[column].set(title=f"{method}, β = {beta:g}", xlabel="epoch", ylabel="bound / N")
            rates = [run["rate"] for run in mine]
            line[2].plot(rates, [run["elbo"][-1] for run in mine], "o-", ms=3, label=method)
            line[3].plot(rates, [run["test"]["map"]["nll"] for run in mine], "o-", ms=3, label=f"{method}, mean")
        line[2].set(xscale="log", xlabel="multiplier", ylabel="bound / N at the end")
        line[3].set(xscale="log", xlabel="multiplier", ylabel="test NLL")
    for ax in axes[0]:
        ax.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    args, settings = command_line(__doc__, "variational laplace", SMALL, only=tuple(DATA))
    settings = {data: settings["common"] | settings[data] | {"data": data} for data in DATA}
    for data in [] if args.report else args.only:
        S = settings[data]
        split = Split(args.data, data, S)
        for run in runs(S):
            stem = name(S, *run)
            with claimed(args.cache / stem, wait=False) as ours:
                if not ours:
                    continue
                work = partial(one, split, S, args.cache, *run)
                found = kept(args.out / f"{stem}.json", work, command=args.command, seed=run[3])
            print(stem, found["test"], f"{found['minutes']:.1f} minutes", flush=True)
    print(report(args.out, settings))


if __name__ == "__main__":
    main()
