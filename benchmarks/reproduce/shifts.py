"""Images that drift away from the training data: rotated MNIST, and a pretrained ResNet-20 on CIFAR-10 made worse.

    python benchmarks/reproduce/shifts.py --data DIR [--only mnist,cifar] [--report]

Precisions are chosen by the negative log likelihood on images that have not drifted: 1,000 validation images of MNIST,
and of CIFAR-10, whose training images the network has seen, 500 test images that are not scored. The pretrained network
comes alone and without dropout: the ensemble's other members, and the network with dropout, are trained on from it, on
the 10,000 images that are there. The scores of each method are kept under ``--out``, networks under ``--cache``, and
what is there is not run again.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample

import ntkgp
from ntkgp.report import metrics

sys.path.insert(0, str(Path(__file__).parent.parent))
from cifar_networks import DECAY, Members
from harness import kept
from images import (
    DRAWS,
    ENSEMBLE,
    Predict,
    Trained,
    along_sgd,
    nll,
    over_masks,
    over_networks,
    over_weights,
    probabilities,
)
from sparse_cifar import cifar_images, resnet20

mpl.use("Agg")
ANGLES = range(0, 181, 15)
SEVERITIES = range(6)
TESTED = {"mnist": 2000, "cifar": 500}
VALIDATED = 500  # of CIFAR-10's test images, after those that are scored
GRID = torch.logspace(-1, 4, 21)
SUBSET = {"mnist": 200, "cifar": 50}
SUBNETWORK = 1000
SAMPLES = 100
STYLES = {  # by method: colour and line; dashed where there is no posterior of ours
    "MAP": ("#000000", ".--"),
    "ensemble": ("#999999", ".--"),
    "dropout": ("#E69F00", ".--"),
    "SWAG": ("#CC79A7", ".--"),
    "diag": ("#56B4E9", ".-"),
    "last layer": ("#009E73", ".-"),
    "subnetwork": ("#D55E00", ".-"),
    "subnetwork by SWAG": ("#882255", ".-"),
    "GP": ("#0072B2", ".-"),
}


# Drifts


def rotated(x: Tensor, degrees: float) -> Tensor:  # (N, c, H, W)
    """Return the images turned about their centre, bilinearly, with zeros around them."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = x.new_tensor([[c, -s, 0.0], [s, c, 0.0]]).expand(len(x), -1, -1)
    return grid_sample(x, affine_grid(turn, list(x.shape), align_corners=False), align_corners=False)


def noisy(x: Tensor, severity: int) -> Tensor:
    return x + 0.15 * severity * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)


def blurred(x: Tensor, severity: int) -> Tensor:
    """Average over 3 x 3 pixels, again and again."""
    for _ in range(severity):
        x = avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
    return x


def faded(x: Tensor, severity: int) -> Tensor:
    """Draw every image towards its mean."""
    mean = x.mean((-1, -2), keepdim=True)
    return mean + (x - mean) * (1 - 0.17 * severity)


def darkened(x: Tensor, severity: int) -> Tensor:
    return x - 0.3 * severity


CORRUPTIONS = {"noise": noisy, "blur": blurred, "contrast": faded, "dark": darkened}


# Methods


def laplace(net: nn.Module, train: tuple, valid: tuple, method: str, **options: object) -> tuple[Predict, dict]:
    """Fit a posterior, choose its precision on validation images, and return how it predicts."""
    lin = ntkgp.Linearization(net, example=train[0][:2])
    post = ntkgp.fit(lin, train, "categorical", method, "isotropic", tune=False, **options)
    post.tune(validation=valid, grid=GRID, progress=False)
    return lambda x: post.predict(x, num_samples=SAMPLES).probs, {"precision": post.prior.precision.item()}


def posteriors(which: str, net: nn.Module, train: tuple, valid: tuple) -> Iterator[tuple[str, Callable[[], tuple]]]:
    yield "last layer", lambda: laplace(net, train, valid, "last_layer")
    yield "diag", lambda: laplace(net, train, valid, "diag")
    yield "subnetwork", lambda: laplace(net, train, valid, "subnetwork", subnetwork=SUBNETWORK)
    yield "GP", lambda: laplace(net, train, valid, "function", subset=SUBSET[which])


class MNIST:
    """Rotated digits, and all methods of a LeNet."""

    name = "mnist"

    def __init__(self, args: argparse.Namespace) -> None:
        self.trained = Trained(args.data, args.cache, "mnist")
        x, self.y = (part[: TESTED["mnist"]] for part in self.trained.test)
        self.drifts = {"rotation": {angle: rotated(x, angle) for angle in ANGLES}}

    def methods(self) -> Iterator[tuple[str, Callable[[], tuple]]]:
        """Yield every method: a function that returns how to predict, and what was chosen."""
        here = self.trained
        yield "MAP", lambda: (lambda x: probabilities(here.net, x), {"decay": here.decay})
        yield "ensemble", here.ensemble
        yield "dropout", here.dropout
        yield "SWAG", here.swag
        valid = tuple(part[:1000] for part in here.valid)
        yield from posteriors("mnist", here.net, here.train, valid)

        def by_swag() -> tuple:
            chosen = ntkgp.posteriors.subnetworks.SwagVariance(SUBNETWORK, here.path[1] ** 2)
            return laplace(here.net, here.train, valid, "subnetwork", subnetwork=chosen)

        yield "subnetwork by SWAG", by_swag


class CIFAR:
    """Corrupted images, and what can be done for a network that was trained elsewhere."""

    name = "cifar"

    def __init__(self, args: argparse.Namespace) -> None:
        self.net, self.train = resnet20(args.data), cifar_images(args.data, "train")
        self.members = Members(self.net, *self.train, args.cache / "cifar")
        x, y = cifar_images(args.data, "test")
        n = TESTED["cifar"]
        self.y, self.valid = y[:n], (x[n : n + VALIDATED], y[n : n + VALIDATED])
        self.drifts = {name: {s: worse(x[:n], s) for s in SEVERITIES} for name, worse in CORRUPTIONS.items()}

    def methods(self) -> Iterator[tuple[str, Callable[[], tuple]]]:
        """Yield every method: a function that returns how to predict, and what was chosen."""
        yield "MAP", lambda: (lambda x: probabilities(self.net, x), {})
        yield "ensemble", self.ensemble
        yield "dropout", lambda: (over_masks(self.members.get(0, dropout=True)), {"samples": DRAWS})
        yield "SWAG", self.swag
        yield from posteriors("cifar", self.net, self.train, self.valid)

    def ensemble(self) -> tuple:
        """Average over the network and others that were trained on from it."""
        nets = [self.net, *(self.members.get(seed) for seed in range(1, ENSEMBLE))]
        return over_networks(nets), {"members": ENSEMBLE}

    def swag(self) -> tuple:
        """Average over weights around the path of SGD from the network."""
        return over_weights(self.net, *along_sgd(self.net, *self.train, rate=0.01, decay=DECAY)), {"samples": DRAWS}


PROBLEMS = {"mnist": MNIST, "cifar": CIFAR}


def scored(predict: Predict, drifts: dict[str, dict[int, Tensor]], y: Tensor) -> dict:
    """Return accuracy, NLL and ECE for each drift, step by step."""
    found: dict = {}
    for name, steps in drifts.items():
        p = [predict(x) for x in steps.values()]
        found[name] = {
            "steps": list(steps),
            "accuracy": [metrics.accuracy(q, y) for q in p],
            "nll": [nll(q, y) for q in p],
            "ece": [metrics.expected_calibration_error(q, y) for q in p],
        }
    return found


def run(problem: MNIST | CIFAR, out: Path) -> None:
    """Score what has no score yet."""
    for name, method in problem.methods():

        def work(method: Callable[[], tuple] = method) -> dict:
            predict, chosen = method()
            return {"drifts": scored(predict, problem.drifts, problem.y), "chosen": chosen}

        found = kept(out / f"{problem.name}-{name.replace(' ', '_')}.json", work, method=name)
        told = {drift: [round(v, 3) for v in s["nll"]] for drift, s in found["drifts"].items()}
        print(problem.name, name, found["chosen"], told, f"{found['minutes']:.1f} minutes", flush=True)


def report(out: Path) -> str:
    """Return the tables, and draw the curves."""
    lines = ["# Distribution shift", "", "`make reproduce-shifts`; means over all steps of a drift, and the last.", ""]
    for which in PROBLEMS:
        found = {run["method"]: run for run in (json.loads(p.read_text()) for p in out.glob(f"{which}-*.json"))}
        runs = {name: found[name] for name in STYLES if name in found}
        if not runs:
            continue
        drifts = list(next(iter(runs.values()))["drifts"])
        figure, axes = plt.subplots(
            2, len(drifts), figsize=(2.4 + 2.4 * len(drifts), 4.4), sharex="col", squeeze=False, layout="constrained"
        )
        for column, drift in enumerate(drifts):
            lines += [
                f"## {which}: {drift}",
                "",
                "| method | NLL | last NLL | ECE | last ECE | chosen |",
                "|---" * 6 + "|",
            ]
            for name, found in runs.items():
                s = found["drifts"][drift]
                cells = [f"{sum(s[key]) / len(s[key]):.3f} | {s[key][-1]:.3f}" for key in ("nll", "ece")]
                chosen = ", ".join(f"{key} {value:.3g}" for key, value in found["chosen"].items())
                lines.append(f"| {name} | {' | '.join(cells)} | {chosen} |")
                for ax, key in zip(axes[:, column], ("nll", "ece"), strict=True):
                    color, line = STYLES[name]
                    above = 3 if "--" in line else 2  # the line of a method that equals another shows between dashes
                    ax.plot(s["steps"], s[key], line, color=color, linewidth=1, label=name, zorder=above)
            axes[0, column].set(title=drift)
            axes[1, column].set(xlabel="degrees" if drift == "rotation" else "severity")
            lines.append("")
        axes[0, 0].set(ylabel="NLL")
        axes[1, 0].set(ylabel="ECE")
        for ax in axes.flat:
            ax.spines[["top", "right"]].set_visible(False)
        axes[0, -1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        figure.savefig(out / f"{which}.png", dpi=150)
        plt.close(figure)
        machines, commits = (", ".join(sorted({run[key] for run in runs.values()})) for key in ("machine", "commit"))
        lines += [f"![{which}]({which}.png)", "", f"{machines}; commits {commits}.", ""]
    text = "\n".join(lines)
    (out / "shifts.md").write_text(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", default=",".join(PROBLEMS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path("build/images"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/shifts"))
    parser.add_argument("--report", action="store_true", help="tabulate what is there, run nothing")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    out = args.out
    out.mkdir(parents=True, exist_ok=True)
    if not args.report:
        for name in args.only.split(","):
            run(PROBLEMS[name](args), out)
    print(report(out))


if __name__ == "__main__":
    main()
