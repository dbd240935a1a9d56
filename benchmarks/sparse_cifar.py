"""A pretrained ResNet-20 on CIFAR-10: the network alone, a temperature, its last layer, a subset, inducing values."""

import argparse
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent / "reproduce"))
from harness import Table, kept, peak_mb
from images import nll
from kernel import zoo
from sparse_scores import LINKS, POINTWISE, TEMPERATURES, calibration_gap, paired, scored
from torch import Tensor, nn

import ntkgp
from ntkgp.posteriors.prediction import Latent, predictive_of

__all__ = ["cifar", "cifar_rows"]

GRID, SAMPLES = torch.logspace(-1, 4.4, 28), 256  # precisions; draws a validation point
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def cifar_images(data: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images as the network was trained on them, (N, 3, 32, 32), and labels."""
    with np.load(data / "images/cifar10_part.npz") as raw:
        x, y = torch.as_tensor(raw[f"x_{part}"]), torch.as_tensor(raw[f"y_{part}"]).long()
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in IMAGENET)
    return (x.permute(0, 3, 1, 2).float().div(255) - mean) / std, y


def resnet20(data: Path) -> nn.Module:
    """The network with public weights."""
    net = zoo.ResNet20()
    state = torch.load(data / "weights/cifar10_resnet20.th", "cpu", weights_only=True)["state_dict"]
    stage = re.compile(r"module\.(?:layer(\d)\.(\d))?")
    named = lambda found: f"blocks.{3 * int(found[1]) - 3 + int(found[2])}" if found[1] else ""  # noqa: E731
    net.load_state_dict({stage.sub(named, name): weights for name, weights in state.items()})
    return net.eval()


def by_halves(test: tuple[Tensor, Tensor], probs_after: Callable[[tuple[Tensor, Tensor], Tensor], Tensor]) -> Tensor:
    """Return probabilities of all test images, each half's by what was chosen on the other.

    The network has seen every training image, so that none of them can tell how sure it should be.
    """
    x, y = test
    halves = torch.arange(len(x)) % 2
    p = torch.empty(len(x), int(y.max()) + 1)
    for half in (0, 1):
        here, there = halves == half, halves != half
        p[here] = probs_after((x[there], y[there]), x[here])
    return p


def by_link(post: ntkgp.Posterior, x: Tensor) -> dict[str, Tensor]:
    """Return probabilities by each link, from one look at q(f)."""
    q = post.latent(x)
    latent = Latent(q.mean, q.covariance_matrix)
    draw = lambda: torch.Generator().manual_seed(0)  # noqa: E731
    return {link: predictive_of(post.likelihood, [latent], link, SAMPLES, draw()).probs for link in LINKS}


def cifar(args: argparse.Namespace) -> dict:
    """Score MAP, temperature scaling, last layer, subset GP and variational; what is there is not run again."""
    train, (x, y) = cifar_images(args.data, "train"), cifar_images(args.data, "test")
    net, found, parts = resnet20(args.data), {}, args.cache.parent / "variational"

    def add(name: str, work: Callable[[], Tensor]) -> None:
        def run() -> dict:
            start = time.perf_counter()
            return scored(work(), y) | {"seconds": time.perf_counter() - start, "peak": peak_mb()}

        found[name] = kept(parts / f"cifar-{name.replace(' ', '-').lower()}.json", run)
        told = {key: round(value, 4) for key, value in found[name].items() if isinstance(value, float)}
        print(name, told, flush=True)

    def logits(x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([net(part) for part in x.split(500)])

    def temperature(valid: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
        f = logits(valid[0])
        best = min(TEMPERATURES, key=lambda t: nn.functional.cross_entropy(f / t, valid[1]).item())
        return (logits(x) / best).softmax(-1)

    def posterior(
        method: str,
        ends: Callable[[ntkgp.Posterior], ntkgp.Posterior] = lambda post: post,
        **options: object,
    ) -> Callable[[], Tensor]:
        def work() -> Tensor:
            lin = ntkgp.Linearization(net, example=train[0][:2])
            post = ntkgp.fit(lin, train, "categorical", method, "isotropic", tune=False, progress=False, **options)

            def after(valid: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
                post.prior.precision = 1.0
                post.tune(validation=valid, grid=GRID, progress=False)
                end = ends(post)
                tried = {link: nll(p, valid[1]) for link, p in by_link(end, valid[0]).items()}
                link = min(LINKS, key=tried.__getitem__)
                print(method, "precision", post.prior.precision.item(), tried, flush=True)
                return end.predict(x, link=link, progress=False).probs

            return by_halves((x, y), after)

        return work

    add("MAP", lambda: logits(x).softmax(-1))
    add("temperature", lambda: by_halves((x, y), temperature))
    add("last layer", posterior("last_layer"))
    sparse = {"num_inducing": args.values, "objective": "nystrom"}
    add("variational", posterior("variational", lambda post: post.twin(objective="elbo", epochs=3), **sparse))
    if args.subset:
        add("subset GP", posterior("function", subset=args.subset))
    pair = found["variational"], found["last layer"]
    told = {"ahead": paired(*pair), "calibrated": calibration_gap(*pair), "values": args.values, "subset": args.subset}
    brief = {name: {key: run[key] for key in run if key not in POINTWISE} for name, run in found.items()}
    return told | {"methods": brief}


def cifar_rows(found: dict, table: Table) -> None:
    methods = found["methods"]
    for name, s in methods.items():
        told = f"NLL {s['nll']:.4f}, ECE {s['ece']:.4f}, accuracy {s['accuracy']:.4f}; {s['seconds'] / 60:.1f} minutes"
        table.note(f"CIFAR-10, ResNet-20: {name}", told)
    what = f"CIFAR-10: variational (M = {found['values']})"
    for score, key in (("NLL", "ahead"), ("ECE", "calibrated")):
        gap, error = found[key]
        table.above(f"{what}, {score} below last layer's", gap, 0, f"± {error:.4f}")
