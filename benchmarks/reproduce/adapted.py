"""The adapted evidence on MNIST: θ_⋆ against θ*, one against many precisions, for five kinds of network.

    python benchmarks/reproduce/adapted.py --data DIR [--seeds 3] [--points 10000] [--only cnn,curve] [--report]

The tutorial's comparison ("Systematic analysis, 46k parameter models"): networks are trained on all 60,000 images by
Adam, with a rate that falls to zero; the linear model, with Kronecker factors, sees the first ``--points`` of them,
weighted so that they stand for all, and is scored on the first 1,000 test images. Precisions come from the evidence,
by MacKay's fixed point: at θ* from P/‖θ*‖², at θ_⋆ from where those at θ* ended; θ_⋆ is found by minibatches, each
search from where the last one ended. Predictions keep the network's mean. What is under ``--cache`` and ``--out`` is
not run again.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import ntkgp
from ntkgp.report import metrics

sys.path.insert(0, str(Path(__file__).parent.parent))
from harness import commit, machine
from images import images

mpl.use("Agg")
BATCH, EPOCHS, TRAINED, TESTED = 256, 3, 60_000, 1000
STEPS, SEARCH = 4, {"solver": "descent", "epochs": 3}
CURVE = (1, 2, 4, 8)  # epochs after which the two posteriors are compared
SLIDES = {  # test NLL: θ_⋆ with one and many precisions, θ* with one and many
    "transformer": (0.162, 0.162, 0.310, 0.162),
    "cnn": (0.025, 0.025, 0.253, 0.205),
    "resnet": (0.017, 0.016, 0.252, 0.236),
    "pre-resnet": (0.017, 0.016, 0.220, 0.239),
    "fixup": (0.055, 0.061, 0.153, 0.200),
}
COLUMNS = ("θ_⋆, one", "θ_⋆, many", "θ*, one", "θ*, many")


# Networks of about 46,000 parameters


def cnn() -> nn.Module:
    """Three convolutions, each with BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, 2, 2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 5, 2, 2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 72, 3, 2, 1), nn.BatchNorm2d(72), nn.ReLU(),
        nn.Flatten(), nn.Linear(72 * 16, 10),
    )  # fmt: skip


class Block(nn.Module):
    """Two convolutions and a shortcut, normalised after or before."""

    def __init__(self, a: int, b: int, stride: int, before: bool) -> None:
        super().__init__()
        self.before = before
        self.first, self.second = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.Conv2d(b, b, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(a if before else b), nn.BatchNorm2d(b)])
        self.shortcut = nn.Identity() if a == b else nn.Conv2d(a, b, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        if self.before:
            h = self.norms[0](x).relu()
            return self.shortcut(h) + self.second(self.norms[1](self.first(h)).relu())
        h = self.norms[1](self.second(self.norms[0](self.first(x)).relu()))
        return (h + self.shortcut(x)).relu()


def resnet(before: bool) -> nn.Module:
    """A stem and three blocks."""
    stem = [nn.Conv2d(1, 16, 3, 2, 1, bias=False)] + ([] if before else [nn.BatchNorm2d(16), nn.ReLU()])
    blocks = [Block(16, 16, 1, before), Block(16, 32, 2, before), Block(32, 40, 2, before)]
    end = [nn.BatchNorm2d(40), nn.ReLU()] if before else []
    return nn.Sequential(*stem, *blocks, *end, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 10))


class FixupBlock(nn.Module):
    """Scalar biases and a multiplier instead of normalisation (Zhang, Dauphin & Ma 2019)."""

    def __init__(self, a: int, b: int, stride: int, blocks: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.Conv2d(b, b, 3, 1, 1, bias=False)
        self.shortcut = nn.Identity() if a == b else nn.Conv2d(a, b, 1, stride, bias=False)
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(1))
        nn.init.normal_(self.first.weight, std=math.sqrt(2 / (b * 9)) * blocks**-0.5)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        h = (self.first(x + self.biases[0]) + self.biases[1]).relu()
        h = self.second(h + self.biases[2]) * self.scale + self.biases[3]
        return (h + self.shortcut(x + self.biases[0])).relu()


def fixup() -> nn.Module:
    """The same blocks without norms."""
    blocks = [FixupBlock(16, 16, 1, 3), FixupBlock(16, 32, 2, 3), FixupBlock(32, 40, 2, 3)]
    last = nn.Linear(40, 10)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)


class Transformer(nn.Module):
    """Sixteen patches of 7 x 7, two layers with LayerNorm."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 7, 7)
        self.places = nn.Parameter(0.02 * torch.randn(1, 16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 128, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        h = self.patches(x).flatten(2).mT + self.places
        return self.last(self.layers(h).mean(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "cnn": cnn,
    "transformer": Transformer,
    "resnet": lambda: resnet(before=False),
    "pre-resnet": lambda: resnet(before=True),
    "fixup": fixup,
}


def train(net: nn.Module, x: Tensor, y: Tensor, epochs: int, seed: int) -> None:
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * math.ceil(len(x) / BATCH))
    generator = torch.Generator().manual_seed(seed)
    net.train()
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[index]), y[index]).backward()
            optimizer.step()
            schedule.step()
    net.eval()


def trained(name: str, seed: int, epochs: int, args: argparse.Namespace) -> nn.Module:
    """Return a network, trained now if it is not in the cache."""
    torch.manual_seed(seed)
    net, path = NETWORKS[name](), args.cache / f"{name}-{seed}-{epochs}.pt"
    if path.exists():
        net.load_state_dict(torch.load(path, weights_only=True))
        return net.eval()
    start = time.perf_counter()
    train(net, *images(args.data, "mnist", "train"), epochs, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(net.state_dict(), path)
    print(f"trained {path.stem}: {time.perf_counter() - start:.0f} s", flush=True)
    return net


# Posteriors


def prior(lin: ntkgp.Linearization, many: bool) -> ntkgp.priors.Prior:
    if many:
        return ntkgp.priors.Grouped(lin, by="normalized")
    return ntkgp.priors.Isotropic(lin, lin.num_params / lin.theta.square().sum().item())


def posterior(lin: ntkgp.Linearization, data: tuple[Tensor, Tensor]) -> ntkgp.Posterior:
    weights = torch.full((len(data[0]),), TRAINED / len(data[0]))
    return ntkgp.fit(lin, data, "categorical", "kron", prior(lin, many=True), weights=weights, memory_budget=1 << 30)


def again(post: ntkgp.Posterior, many: bool) -> ntkgp.Posterior:
    """Return the posterior under an untuned prior; factors do not depend on it, and are not computed again."""
    new = post._at(None, prior(post.lin, many))
    new._kept = post._kept
    return new


def tuned(post: ntkgp.Posterior, at: str) -> ntkgp.Posterior:
    return post.tune(at=at, method="fixed_point", steps=STEPS, search=SEARCH if at == "linear_mode" else None)


def scored(prediction: ntkgp.posteriors.Prediction, y: Tensor) -> dict[str, float]:
    return {
        "nll": -prediction.log_prob(y).mean().item(),
        "accuracy": metrics.accuracy(prediction.probs, y),
        "ece": metrics.expected_calibration_error(prediction.probs, y),
    }


def compare(name: str, seed: int, args: argparse.Namespace) -> dict:
    """Score the network, and its posteriors under both evidences and both priors."""
    x, y = images(args.data, "mnist", "train")
    x_test, y_test = (part[:TESTED] for part in images(args.data, "mnist", "test"))
    net = trained(name, seed, EPOCHS, args)
    lin = ntkgp.Linearization(net, example=x[:2])
    data = x[: args.points], y[: args.points]
    found: dict = {"parameters": lin.num_params, "points": args.points, "seconds": {}}
    fitted = posterior(lin, data)
    found["MAP"] = scored(fitted.predict(x_test, predictive="map"), y_test)
    for column in reversed(COLUMNS):
        start = time.perf_counter()
        post = again(fitted, many="many" in column)
        if "⋆" in column:
            post.prior.precision = torch.tensor(found[column.replace("⋆", "*").replace("_", "")]["precision"])
        tuned(post, "linear_mode" if "⋆" in column else "map")
        found[column] = scored(post.predict(x_test), y_test) | {
            "precision": post.prior.precision.tolist(),
            "norm": (lin.theta if post._last_mode is None else lin.theta + post._last_mode).norm().item(),
            "history": post.history,
        }
        found["seconds"][column] = time.perf_counter() - start
        print(name, seed, column, f"{found[column]['nll']:.4f}", f"{found['seconds'][column]:.0f} s", flush=True)
    return found


def go_on(name: str, seed: int, found: dict, args: argparse.Namespace) -> dict:
    """Score θ* after as many steps as θ_⋆ has had: those for θ_⋆ begin where these for θ* ended."""
    x, y = images(args.data, "mnist", "train")
    x_test, y_test = (part[:TESTED] for part in images(args.data, "mnist", "test"))
    lin = ntkgp.Linearization(trained(name, seed, EPOCHS, args), example=x[:2])
    fitted, more = posterior(lin, (x[: args.points], y[: args.points])), {}
    for which in ("one", "many"):
        post = again(fitted, many=which == "many")
        post.prior.precision = torch.tensor(found[f"θ*, {which}"]["precision"])
        tuned(post, "map")
        more[which] = scored(post.predict(x_test), y_test) | {"precision": post.prior.precision.tolist()}
        print(name, seed, which, f"{found[f'θ*, {which}']['nll']:.4f} to {more[which]['nll']:.4f}", flush=True)
    return more


def wasserstein(a: Tensor, b: Tensor) -> float:  # (N, C, C) twice
    """Return the mean W₂ distance between Gaussians with equal means: tr(A + B − 2 (A^½ B A^½)^½)."""
    values, vectors = torch.linalg.eigh(a.double())
    root = (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.mT
    cross = torch.linalg.eigvalsh(root @ b.double() @ root).clamp(min=0).sqrt().sum(-1)
    trace = (a + b).double().diagonal(dim1=-2, dim2=-1).sum(-1)
    return (trace - 2 * cross).clamp(min=0).sqrt().mean().item()


def curve(args: argparse.Namespace) -> list[dict]:
    """Compare the two posteriors of the CNN as its training goes on, at a constant rate."""
    x, y = images(args.data, "mnist", "train")
    x_test, y_test = (part[:TESTED] for part in images(args.data, "mnist", "test"))
    torch.manual_seed(0)
    net, found = NETWORKS["cnn"](), []
    optimizer, generator = torch.optim.Adam(net.parameters(), 1e-3), torch.Generator().manual_seed(0)
    for epoch in range(1, max(CURVE) + 1):
        net.train()
        for index in torch.randperm(len(x), generator=generator).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[index]), y[index]).backward()
            optimizer.step()
        net.eval()
        if epoch not in CURVE:
            continue
        lin = ntkgp.Linearization(net, example=x[:2])
        data = x[: args.points], y[: args.points]
        fitted = posterior(lin, data)
        posts = {"map": tuned(again(fitted, many=True), "map")}
        posts["linear_mode"] = again(fitted, many=True)
        posts["linear_mode"].prior.precision = posts["map"].prior.precision.detach().clone()
        tuned(posts["linear_mode"], "linear_mode")
        blocks = [post.latent(x_test).covariance_matrix for post in posts.values()]
        predictions = {at: post.predict(x_test) for at, post in posts.items()}
        found.append(
            {
                "epoch": epoch,
                "wasserstein": wasserstein(*blocks),
                "test nll of the network": nn.functional.cross_entropy(lin(x_test), y_test).item(),
                "nll": {at: -p.log_prob(y_test).mean().item() for at, p in predictions.items()},
            }
        )
        print(found[-1], flush=True)
    return found


# Report


def report(args: argparse.Namespace) -> None:
    runs = {name: [json.loads(p.read_text()) for p in sorted(args.out.glob(f"{name}-?.json"))] for name in NETWORKS}
    runs = {name: found for name, found in runs.items() if found}
    points = next(iter(runs.values()))[0]["points"]
    lines = [
        "# The adapted evidence: θ_⋆ against θ*, one against many precisions",
        "",
        f"`make reproduce-adapted`: MNIST, networks trained on 60,000 images for {EPOCHS} epochs, Kronecker factors of",
        f"the linear model on the first {points:,} of them, each standing for {TRAINED // points}, {STEPS} steps of",
        f"MacKay's fixed point; the first {TESTED:,} test images; mean and standard error over seeds; in brackets the",
        f"slides' figures. {next(iter(runs.values()))[0]['machine']}.",
        "",
        "Searches for θ_⋆ are not run to convergence. A network without scale-invariant groups has one precision under",
        "either prior.",
        "",
        "| test NLL | parameters | MAP | " + " | ".join(COLUMNS) + " |",
        "|---|---|---|" + "---|" * len(COLUMNS),
    ]
    for name, found in runs.items():
        cells = [name, f"{found[0]['parameters']:,}", _cell([r["MAP"]["nll"] for r in found])]
        cells += [f"{_cell([r[c]['nll'] for r in found])} ({SLIDES[name][i]})" for i, c in enumerate(COLUMNS)]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Steps for θ_⋆ begin where {STEPS} at θ* ended; so the last columns have θ* after {2 * STEPS} of its own.",
        "",
        "| wherever the slides have a factor of two | θ* − θ_⋆, paired | more than its standard error "
        "| θ*, as many steps | the same |",
        "|---|---|---|---|---|",
    ]
    for name, found in runs.items():
        for which in ("one", "many"):
            i = COLUMNS.index(f"θ_⋆, {which}")
            if SLIDES[name][i + 2] < 2 * SLIDES[name][i] - 0.02:
                continue
            gone_on = [r for r in found if "θ*, going on" in r]
            cells = _gap([r[f"θ*, {which}"] for r in found], found, which)
            cells += _gap([r["θ*, going on"][which] for r in gone_on], gone_on, which) if gone_on else ["", ""]
            lines.append(f"| {name}, {which} | " + " | ".join(cells) + " |")
    lines += ["", "| accuracy, ECE | MAP | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---|" * len(COLUMNS)]
    for name, found in runs.items():
        cells = [
            ", ".join(f"{sum(r[c][k] for r in found) / len(found):.4f}" for k in ("accuracy", "ece"))
            for c in ("MAP", *COLUMNS)
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if (args.out / "curve.json").exists():
        lines += ["", "![distance between the two posteriors](curve.png)"]
        _figure(json.loads((args.out / "curve.json").read_text())["curve"], args.out / "curve.png")
    (args.out / "README.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _gap(at_map: list[dict], found: list[dict], which: str) -> list[str]:
    gap = torch.tensor([m["nll"] - r[f"θ_⋆, {which}"]["nll"] for m, r in zip(at_map, found, strict=True)])
    if len(gap) == 1:
        return [f"{gap.item():.4f} (one seed)", ""]
    error = gap.std().item() / len(gap) ** 0.5
    return [f"{gap.mean():.4f} ± {error:.4f} ({len(gap)} seeds)", "yes" if gap.mean() > error else "no"]


def _cell(values: list[float]) -> str:
    v = torch.tensor(values)
    return f"{v.mean():.3f}" + (f" ± {v.std() / len(v) ** 0.5:.3f}" if len(v) > 1 else "")


def _figure(found: list[dict], path: Path) -> None:
    epochs = [row["epoch"] for row in found]
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    axes[0].plot(epochs, [row["wasserstein"] for row in found], "o-")
    axes[0].set(xlabel="epochs", ylabel="mean $W_2$ between q(f) under both", xscale="log")
    for at, label in (("map", "evidence at θ*"), ("linear_mode", "at the linear mode")):
        axes[1].plot(epochs, [row["nll"][at] for row in found], "o-", label=label)
    axes[1].plot(epochs, [row["test nll of the network"] for row in found], "k--", label="network")
    axes[1].set(xlabel="epochs", ylabel="test NLL", xscale="log")
    axes[1].legend(ncols=3, fontsize=7, loc="upper center")
    for ax in axes:
        ax.set_xticks(epochs, epochs)
        ax.minorticks_off()
        ax.set_ylim(0, 1.3 * ax.get_ylim()[1])
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--only", default=",".join([*NETWORKS, "curve"]))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path("build/adapted"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/adapted"))
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    origin = commit()  # of the code that runs, whatever is committed meanwhile
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.report:
        parts = args.only.split(",")
        for seed in range(args.seeds):
            for name in (name for name in NETWORKS if name in parts):
                path = args.out / f"{name}-{seed}.json"
                if not path.exists():
                    found = compare(name, seed, args) | {"commit": origin, "machine": machine(), "seed": seed}
                    path.write_text(json.dumps(found, indent=1) + "\n")
                found = json.loads(path.read_text())
                if "θ*, going on" not in found:
                    found["θ*, going on"] = go_on(name, seed, found, args) | {"commit": origin}
                    path.write_text(json.dumps(found, indent=1) + "\n")
        if "curve" in parts and not (args.out / "curve.json").exists():
            found = {"curve": curve(args), "commit": origin, "machine": machine(), "seed": 0}
            (args.out / "curve.json").write_text(json.dumps(found, indent=1) + "\n")
    report(args)


if __name__ == "__main__":
    main()
