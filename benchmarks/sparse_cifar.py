"""A pretrained ResNet-20 on CIFAR-10: the network alone, a temperature, its last layer, a subset, inducing values."""

import argparse
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "reproduce"))
from harness import Table, kept, peak_mb
from images import images, nll
from kernel import zoo
from sparse_scores import POINTWISE, TEMPERATURES, calibration_gap, paired, scored
from torch import Tensor, nn

import ntkgp
from ntkgp.posteriors.tuning import predictor

__all__ = ["cifar", "cifar_rows"]

PRECISIONS, HEATS = torch.logspace(-1, 4.5, 12).tolist(), (1.0, 1.3, 1.6, 1.9, 2.2, 2.5)
EPOCHS = 3
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def cifar_images(data: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images as the network was trained on them, (N, 3, 32, 32), and labels."""
    x, y = images(data, "cifar10_part", part)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in IMAGENET)
    return (x - mean) / std, y


def resnet20(data: Path) -> nn.Module:
    """The network with public weights."""
    net = zoo.ResNet20()
    state = torch.load(data / "weights/cifar10_resnet20.th", "cpu", weights_only=True)["state_dict"]
    stage = re.compile(r"module\.(?:layer(\d)\.(\d))?")
    named = lambda found: f"blocks.{3 * int(found[1]) - 3 + int(found[2])}" if found[1] else ""  # noqa: E731
    net.load_state_dict({stage.sub(named, name): weights for name, weights in state.items()})
    return net.eval()


Tried = dict[tuple[float, ...], Tensor]  # by setting: probabilities of all test images


def by_halves(tried: Tried, y: Tensor) -> dict:
    """Score all test images, each half of them under the setting that is best on the other.

    The network has seen every training image, so that none of them can tell how sure it should be.
    """
    halves, p, chosen = torch.arange(len(y)) % 2, torch.empty_like(next(iter(tried.values()))), []
    for half in (0, 1):
        here, there = halves == half, halves != half
        chosen.append(min(tried, key=lambda setting: nll(tried[setting][there], y[there])))
        p[here] = tried[chosen[-1]][here]
    return scored(p, y) | {"chosen": chosen}


def cifar(args: argparse.Namespace) -> dict:
    """Score MAP, temperature scaling, last layer, subset GP and variational; what is there is not run again.

    Posteriors have a precision and a temperature, both by validation; scores by a precision alone stand beside.
    """
    train, (x, y) = cifar_images(args.data, "train"), cifar_images(args.data, "test")
    net, found, parts = resnet20(args.data), {}, args.cache.parent / "variational"
    with torch.no_grad():
        logits = torch.cat([net(part) for part in x.split(500)])

    def add(name: str, work: Callable[[], Tried]) -> None:
        def run() -> dict:
            start = time.perf_counter()
            tried = work()
            cold = {setting: p for setting, p in tried.items() if setting[-1] == 1}
            told = {"seconds": time.perf_counter() - start, "peak": peak_mb(), "untempered": by_halves(cold, y)}
            return by_halves(tried, y) | told

        found[name] = kept(parts / f"cifar-{name.replace(' ', '-').lower()}.json", run)
        told = {key: round(value, 4) for key, value in found[name].items() if isinstance(value, float)}
        print(name, told, found[name]["chosen"], flush=True)

    def posterior(method: str, **options: object) -> Callable[[], Tried]:
        def work() -> Tried:
            lin = ntkgp.Linearization(net, example=train[0][:2])
            post = ntkgp.fit(lin, train, "categorical", method, "isotropic", tune=False, progress=False, **options)
            predict, tried = predictor(post, x), {}
            for heat in HEATS:
                for precision in PRECISIONS:
                    post.prior.precision, post.likelihood.temperature = precision, heat
                    tried[precision, heat] = predict().probs
                print(method, f"temperature {heat}", flush=True)
            return tried

        return work

    add("MAP", lambda: {(1.0,): logits.softmax(-1)})
    add("temperature", lambda: {(t,): (logits / t).softmax(-1) for t in (1.0, *TEMPERATURES.tolist())})
    add("last layer", posterior("last_layer"))
    add("variational", posterior("variational", num_inducing=args.values, epochs=EPOCHS))
    if args.subset:
        add("subset GP", posterior("function", subset=args.subset))
    pair = found["variational"], found["last layer"]
    cold = tuple(run["untempered"] for run in pair)
    gaps = {name: [paired(*runs), calibration_gap(*runs)] for name, runs in (("", pair), (", no temperature", cold))}
    told = {"gaps": gaps, "values": args.values, "subset": args.subset}
    return told | {"methods": {name: brief(run) for name, run in found.items()}}


def brief(run: dict) -> dict:
    """Return a run without what is kept point by point."""
    return {key: brief(run[key]) if isinstance(run[key], dict) else run[key] for key in run if key not in POINTWISE}


def cifar_rows(found: dict, table: Table) -> None:
    methods = found["methods"]
    for name, s in methods.items():
        chosen = " and ".join(", ".join(f"{v:.3g}" for v in setting) for setting in s["chosen"])
        told = (
            f"NLL {s['nll']:.4f}, ECE {s['ece']:.4f}, accuracy {s['accuracy']:.4f}; {s['seconds'] / 60:.1f} minutes; "
        )
        told += f"by halves {chosen}; without temperature NLL {s['untempered']['nll']:.4f}, "
        table.note(f"CIFAR-10, ResNet-20: {name}", told + f"ECE {s['untempered']['ece']:.4f}")
    for setting, gaps in found["gaps"].items():
        for score, (gap, error) in zip(("NLL", "ECE"), gaps, strict=True):
            what = f"CIFAR-10: variational (M = {found['values']}){setting}: {score} below last layer's"
            table.above(what, gap, 0, f"± {error:.4f}")
