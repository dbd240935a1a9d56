"""One run that sets its own weight decay beside a grid of decays tuned on validation data, on MNIST and FashionMNIST.

    python benchmarks/reproduce/evidence_training.py --data DIR [--small] [--report]

Both have the same labelled images. The grid holds some of them back, takes the decay with the smallest NLL there, and
trains once more on all; evidence-driven training uses all from the start. Settings stand in training.json. One JSON a
run is kept under ``--out``, and what is there is not run again; runs that are stopped go on from ``--cache``.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from ntkgp.training import EvidenceTraining, MaximumAPosteriori

sys.path.insert(0, str(Path(__file__).parent.parent))
from harness import kept
from images import images
from modes import mlp
from settings import command_line, mean_and_error
from variational_laplace import scored

mpl.use("Agg")
SMALL = {
    "data": ["mnist"], "train": 300, "validation": 100, "test": 200, "seeds": [0, 1], "decays": [1e-4, 1e-3],
    "epochs": {"mlp": 4, "cnn": 4}, "burn in": 2, "every": 1, "subset": 50,
}  # fmt: skip
SCORES = "nll", "accuracy", "ece"
FALLS = 0.7, 0.9  # of all epochs, where learning rates fall
Pair = tuple[Tensor, Tensor]


def cnn() -> nn.Module:
    """Two convolutions with strides and two linear layers, 106,122 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(1568, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), *mlp(784, 10, 100, 2, nn.ReLU)),
    "cnn": cnn,
}


def fit(S: dict, network: str, objective: MaximumAPosteriori, data: Pair, checkpoint: Path) -> object:
    epochs = S["epochs"][network]
    options = {"batch_size": S["batch"], "lr": S["lr"], "milestones": [int(part * epochs) for part in FALLS]}
    return objective.fit(data, epochs, checkpoint=checkpoint, progress=False, **options)


def decayed(S: dict, network: str, seed: int, decay: float, train: Pair, judged: dict[str, Pair], cache: Path) -> dict:
    """Train with one weight decay λ, precision λ N for all weights."""
    torch.manual_seed(seed)
    objective = MaximumAPosteriori(NETWORKS[network](), prior_std=(decay * len(train[0])) ** -0.5, seed=seed)
    post = fit(S, network, objective, train, cache)
    scores = {which: scored(post.predict(x, predictive="map").probs, y) for which, (x, y) in judged.items()}
    return {"decay": decay, "points": len(train[0])} | scores


def evidence(S: dict, network: str, seed: int, train: Pair, test: Pair, cache: Path) -> dict:
    """Train with precisions by layer that the evidence moves."""
    torch.manual_seed(seed)
    options = {"burn_in": S["burn in"], "every": S["every"], "subset": S["subset"], "structure": S["structure"]}
    objective = EvidenceTraining(NETWORKS[network](), seed=seed, **options)
    post = fit(S, network, objective, train, cache)
    x, y = test
    updates = [
        {key: entry[key] for key in ("epoch", "log_evidence", "effective_parameters", "parameters", "precision")}
        for entry in objective.history
        if "log_evidence" in entry
    ]
    ways = {"test": {"predictive": "map"}, "test, posterior": {}}
    scores = {which: scored(post.predict(x, progress=False, **how).probs, y) for which, how in ways.items()}
    return {"points": len(train[0]), "updates": updates} | scores


def run(args: object, S: dict, data: str, network: str, seed: int) -> None:
    """Do all that one network on one data set needs."""
    x, y = images(args.data, data, "train")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: S["train"]]
    train, held = (x[order], y[order]), S["validation"]
    test = tuple(part[: S["test"]] for part in images(args.data, data, "test"))
    fewer, validation = tuple(part[held:] for part in train), tuple(part[:held] for part in train)

    def keep(name: str, work: Callable[[Path], dict]) -> dict:
        path = args.out / f"evidence-{data}-{network}-{name}-{seed}.json"
        told = {"data": data, "network": network, "run": name, "seed": seed, "command": args.command}
        found = kept(path, lambda: work(args.cache / path.stem), **told)
        print(path.stem, found["test"], f"{found['minutes']:.1f} minutes", flush=True)
        return found

    keep("evidence", partial(evidence, S, network, seed, train, test))
    grid = {}
    for decay in S["decays"]:
        judged = {"validation": validation, "test": test}
        grid[decay] = keep(f"decay{decay:g}", partial(decayed, S, network, seed, decay, fewer, judged))
    chosen = min(grid, key=lambda decay: grid[decay]["validation"]["nll"])
    keep("retrained", partial(decayed, S, network, seed, chosen, train, {"test": test}))


# The report


def report(out: Path, S: dict) -> str:
    found = [json.loads(path.read_text()) for path in sorted(out.glob("evidence-*.json"))]
    if not found:
        return "nothing has run yet"
    commits = ", ".join(sorted({run["commit"] for run in found}))
    lines = ["# Training that sets its own weight decay", ""]
    epochs = " and ".join(f"{S['epochs'][network]} ({network})" for network in S["networks"])
    lines += [
        f"`make reproduce-training`: {S['train']} training images, {epochs} epochs, {len(S['decays'])} decays, seeds "
        f"{S['seeds']}; {found[0]['machine']}, commits {commits}. Means ± standard errors over seeds; minutes are of "
        "all runs that the row needs. The last row is the first's lead over the decay by validation, seed by seed.",
        "",
        "| data | network | | test NLL | accuracy | ECE | γ of parameters | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for data in S["data"]:
        for network in S["networks"]:
            some = [run for run in found if (run["data"], run["network"]) == (data, network)]
            lines += [f"| {data} | {network} | {row} |" for row in _rows(some, S)]
    lines += ["", "![evidence and effective parameters](evidence_training.png)", ""]
    draw(out / "evidence_training.png", found, S)
    text = "\n".join(lines)
    (out / "evidence_training.md").write_text(text)
    return text


def _rows(some: list[dict], S: dict) -> list[str]:
    own, again = ([r for r in some if r["run"] == name] for name in ("evidence", "retrained"))
    grid = [r for r in some if r["run"].startswith("decay")]
    seeds = [s for s in S["seeds"] if any(r["seed"] == s for r in again)]
    chosen = [min((r for r in grid if r["seed"] == s), key=lambda r: r["validation"]["nll"]) for s in seeds]
    last = [r["updates"][-1] for r in own if r["updates"]]
    gamma = sum(sum(u["effective_parameters"].values()) for u in last) / max(1, len(last))
    capacity = f"{gamma:.0f} of {sum(last[0]['parameters'].values())}" if last else ""
    minutes = {"own": sum(r["minutes"] for r in own), "grid": sum(r["minutes"] for r in grid)}
    minutes["again"] = minutes["grid"] + sum(r["minutes"] for r in again)
    rows = (
        ("evidence, one run", own, "test", capacity, minutes["own"]),
        ("evidence, with its posterior", own, "test, posterior", "", minutes["own"]),
        ("decay by validation", chosen, "test", "", minutes["grid"]),
        ("the same, trained again on all", again, "test", "", minutes["again"]),
    )
    table = [
        f"{name} | "
        + " | ".join(mean_and_error([r[which][key] for r in of], 4) for key in SCORES)
        + f" | {told} | {spent:.0f}"
        for name, of, which, told, spent in rows
        if of
    ]
    mine = {r["seed"]: r["test"] for r in own}
    pairs = [(mine[r["seed"]], r["test"]) for r in chosen]
    leads = [
        mean_and_error([(b[key] - a[key]) * (-1 if key == "accuracy" else 1) for a, b in pairs], 4) for key in SCORES
    ]
    return table + ([f"lead | {' | '.join(leads)} | |"] if pairs else [])


def draw(path: Path, found: list[dict], S: dict) -> None:
    """Draw the evidence and the effective number of parameters along training."""
    own = [run for run in found if run["run"] == "evidence" and run["seed"] == S["seeds"][0]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
    for run in own:
        epochs, label = [u["epoch"] + 1 for u in run["updates"]], f"{run['data']}, {run['network']}"
        left.plot(epochs, [u["log_evidence"] / run["points"] for u in run["updates"]], "o-", ms=3, label=label)
        right.plot(epochs, [sum(u["effective_parameters"].values()) for u in run["updates"]], "o-", ms=3, label=label)
    left.set(xlabel="epoch", ylabel="log evidence / N")
    right.set(xlabel="epoch", ylabel="effective parameters γ", yscale="log")
    left.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    args, S = command_line(__doc__, "evidence training", SMALL)
    if not args.report:
        for data in S["data"]:
            for network in S["networks"]:
                for seed in S["seeds"]:
                    run(args, S, data, network, seed)
    print(report(args.out, S))


if __name__ == "__main__":
    main()
