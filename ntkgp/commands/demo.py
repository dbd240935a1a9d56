"""See it work in a minute: a network is trained, then gets its error bars.

classify: an overconfident classifier of breast cancers, on data that ship with scikit-learn; regress: a curve with a
gap in the training data; reconstruct: the Shepp-Logan head from twenty noisy projections. All that is made stays in the
output folder: a page to look at, and for the first two the data, the weights and the posterior, for ntkgp predict, tune
and report to try.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_model
from torch import Tensor, nn

import ntkgp
from ntkgp.commands.answer import Answer
from ntkgp.commands.arguments import nonnegative, positive
from ntkgp.commands.folder import whole_folder
from ntkgp.commands.report import scored
from ntkgp.commands.saved import SavedPosterior, write_posterior
from ntkgp.report import report

NAME, HELP = "demo", "see it work in a minute"
Pair = tuple[Tensor, Tensor]  # X, y
FILES = ("report.html", "train.npz", "test.npz", "weights.safetensors", "post")
_FAR = "the mode of the linear model gains"  # how the warning begins
SIZE, ANGLES, NOISE = 28, 20, 0.05  # of the reconstruction; noise beside the mean of the sinogram


def make_classifier() -> nn.Module:
    """Return the network of ``ntkgp demo classify``."""
    return nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 2))


def make_regressor() -> nn.Module:
    """Return the network of ``ntkgp demo regress``."""
    return nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))


def _cancers() -> tuple[Pair, Pair]:
    """Return one half to train on, and one to test on, in units of the first."""
    from sklearn.datasets import load_breast_cancer

    X, y = (torch.as_tensor(part) for part in load_breast_cancer(return_X_y=True))
    train, test = torch.randperm(len(X)).split([len(X) // 2, len(X) - len(X) // 2])
    X = ((X - X[train].mean(0)) / X[train].std(0)).float()
    return (X[train], y[train]), (X[test], y[test])


def _curve() -> tuple[Pair, Pair]:
    """Return 100 points from -3 to -1 and from 1 to 3, and 200 from -3 to 3."""
    x, x_test = 2 * torch.rand(100, 1) + 1, 6 * torch.rand(200, 1) - 3
    x[50:] -= 4
    y, y_test = (torch.sin(2 * t) + 0.3 * t + 0.2 * torch.randn_like(t) for t in (x, x_test))
    return (x, y), (x_test, y_test)


@dataclass(frozen=True)
class Demo:
    """A task: its data, network, loss and likelihood, and whether the mean moves, too."""

    data: Callable[[], tuple[Pair, Pair]]
    make: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    likelihood: str
    refine: bool


DEMOS = {
    "classify": Demo(_cancers, make_classifier, nn.functional.cross_entropy, "categorical", refine=True),
    "regress": Demo(_curve, make_regressor, nn.functional.mse_loss, "gaussian", refine=False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("kind", nargs="?", choices=(*DEMOS, "reconstruct"), default="classify", help="what to see (default: classify)")
    add("-o", "--output", type=Path, metavar="FOLDER", help="where it all goes (default: demo-KIND)")
    add("--overwrite", action="store_true", help="replace an earlier demo in that folder")
    add("--steps", type=positive(int), help="of training (default: 300, for reconstruct 1000)")
    add("--seed", type=nonnegative(int), default=0, help="of all that is random (default: 0)")


def run(args: argparse.Namespace) -> Answer:
    """Train, fit, tell and write; nothing is written if anything fails."""
    output = args.output or Path(f"demo-{args.kind}")
    torch.manual_seed(args.seed)
    if args.kind == "reconstruct":
        return _reconstruct(output, args)
    demo = DEMOS[args.kind]
    with whole_folder(output, FILES, args.overwrite) as folder:
        train, test = demo.data()
        for name, (x, y) in (("train", train), ("test", test)):
            np.savez(folder / f"{name}.npz", X=x.numpy(), y=y.numpy())
        net = _trained(demo, *train, args.steps or 300)
        save_model(net, str(folder / "weights.safetensors"))
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _FAR)  # that is why it is refined
            post = ntkgp.fit(net, train, demo.likelihood, prior="layerwise")
            post = post.refine() if demo.refine else post
        seconds = time.perf_counter() - start
        maker = f"{__name__}:{demo.make.__name__}"
        write_posterior(SavedPosterior(post, net, maker, seconds), folder / "post", False)
        title = f"Demo: {args.kind}"
        found = report(post, test, title=title, seconds=seconds)
        found.save(folder / "report.html")
    told = scored(found, output / "report.html", [])
    text = (
        f"{len(train[1])} training points, {len(test[1])} test points, {post.lin.num_params} weights; error bars in "
        f"{seconds:.1f} s\n{told.text}\ngo on: ntkgp predict {output}/post {output}/test.npz -o predictions.csv"
    )
    return Answer(text, told.values)


def _trained(demo: Demo, x: Tensor, y: Tensor, steps: int) -> nn.Module:
    net = demo.make()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        demo.loss(net(x), y).backward()
        optimizer.step()
    return net


def _reconstruct(output: Path, args: argparse.Namespace) -> Answer:
    from ntkgp.commands import results

    with whole_folder(output, results.FILES, args.overwrite) as folder:
        truth = ntkgp.inverse.phantoms.shepp_logan(SIZE)
        A = ntkgp.inverse.RayTransform.parallel(SIZE, ANGLES)
        y = A(truth.unsqueeze(0))
        y = y + NOISE * y.mean() * torch.randn_like(y)
        start = time.perf_counter()
        net, steps = ntkgp.inverse.UNet(channels=8, scales=2), args.steps or 1000
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _FAR)
            rec = ntkgp.reconstruct(A, y, net, steps=steps, rate=3e-3, tuning_steps=min(30, steps), seed=args.seed)
        samples = rec.sample(3, torch.Generator().manual_seed(args.seed))
        settings = {"steps": steps, "seed": args.seed, "noise": None}
        took = time.perf_counter() - start
        found = results.Results(rec, A.fbp(y)[0], samples, truth, settings, [], took)
        found.write(folder)
    page = str(output / results.PAGE)
    lines = [f"{SIZE} x {SIZE} pixels from {ANGLES} projections with {NOISE:.0%} noise, {took:.0f} s"]
    lines += [f"{name:36}{value}" for name, value in found.scores().items()]
    return Answer("\n".join([*lines, page]), {"page": page, "seconds": took} | found.scores())
