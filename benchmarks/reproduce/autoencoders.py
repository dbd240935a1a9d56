"""Laplacian autoencoders beside others: Tables 2 and 3 and Figs. 1, 9, 10, 11 and 12 of Miani et al. (2022).

    python benchmarks/reproduce/autoencoders.py --data DIR [--small] [--report] [--only ood] [--models AE VAE]

"ood": convolutional autoencoders with two latent numbers, trained on FashionMNIST, judge its test images and MNIST's;
"fewer": the same, trained on fewer images.
"digits": linear ones, trained on MNIST, reconstruct, fill in the upper half of test images, and classify by codes. All
have unit noise but those that predict it. Settings stand in training.json. One JSON a model is kept under ``--out``,
and what is there is not run again; networks that are trained, or not yet, are kept under ``--cache``. The same command
in two processes shares the work between them.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ntkgp.report import metrics
from ntkgp.training.autoencoders import (
    CodeNeighbours,
    LaplacianAutoencoder,
    StochasticAutoencoder,
    decoded,
    generated,
    imputed,
    ood_scores,
    reconstructed,
)

sys.path.insert(0, str(Path(__file__).parent.parent))
from autoencoders_models import MODELS, Trainer
from autoencoders_report import as_text, report
from harness import kept
from images import images
from settings import claimed, command_line
from variational_laplace import scored

SMALL = {
    "samples": 5, "members": 2,
    "ood": {
        "train": 256, "validation": 50, "test": 60, "epochs": 1, "milestones": [], "warm epochs": 1, "bins": 10,
        "seeds": [0, 1],
    },
    "fewer": {"train": 128, "validation": 50},
    "digits": {
        "train": 256, "validation": 150, "test": 60, "epochs": 1, "milestones": [], "warm epochs": 1, "map": 5,
        "imputed": 40, "classifier epochs": 1, "labels": [1, 3], "repetitions": 2, "neighbours tested": 50,
        "neighbour samples": 4,
    },
}  # fmt: skip
# Questions


def told(model: StochasticAutoencoder) -> dict:
    """Return what was learnt of the weights' posterior."""
    if not isinstance(model, LaplacianAutoencoder):
        return {}
    return {"prior std": model.prior_std.median().item(), "weight std": model.variances().sqrt().median().item()}


def fit_of(found: object, x: Tensor) -> dict[str, float]:
    """Return squared errors of mean reconstructions, and log likelihoods, per image."""
    return {
        "mse": (found.mean - x.flatten(1)).square().sum(1).mean().item(),
        "log p": found.log_prob.mean().item(),
        "expected log p": found.expected_log_prob.mean().item(),
    }


def ood(model: StochasticAutoencoder, S: dict, E: dict, sets: dict[str, Tensor]) -> dict:
    """Tell inside from outside by each score."""
    looks = {which: reconstructed(model, x, S["samples"]) for which, x in sets.items()}
    inside, outside = (ood_scores(looks[which], looks["validation"]) for which in ("inside", "outside"))
    found: dict = {"auroc": {}, "histograms": {}}
    for name, own in inside.items():
        found["auroc"][name] = metrics.ood_auc(own, outside[name])
        both = torch.cat([own, outside[name]])
        edges = torch.linspace(both.min(), both.quantile(0.99), E["bins"] + 1, dtype=torch.float64)
        parts = [torch.histogram(v.clamp(max=edges[-1].item()), edges).hist.tolist() for v in (own, outside[name])]
        found["histograms"][name] = {"edges": edges.tolist(), "inside": parts[0], "outside": parts[1]}
    return found | fit_of(looks["inside"], sets["inside"]) | told(model)


def classifier(x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    """Return a small classifier of whole images."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[index]), y[index]).backward()
            optimizer.step()
    return net.eval()


def calibration(probs: Tensor, y: Tensor) -> dict[str, float]:
    found = scored(probs, y)
    found["mce"] = metrics.maximum_calibration_error(probs, y)
    found["rmsce"] = metrics.root_mean_squared_calibration_error(probs, y)
    return found


def lower_half() -> Tensor:  # (28, 28)
    return (torch.arange(28) >= 14).unsqueeze(1).expand(28, 28)


def imputation(model: StochasticAutoencoder, E: dict, x: Tensor, y: Tensor, judge: nn.Module) -> dict:
    """Fill in upper halves; score them, and a classifier that sees them."""
    known = lower_half()
    filled = imputed(model, x, known, E["chains"], E["refinements"], E["steps"])  # (S, N, 1, 28, 28)
    missing, truth = (t[..., ~known] for t in (filled, x))
    squares = (missing - truth).square().flatten(2).sum(-1)  # (S, N)
    log_prob = (-squares / 2).logsumexp(0) - torch.tensor(len(filled)).log()
    with torch.no_grad():
        probs = torch.stack([judge(images).softmax(-1) for images in filled]).mean(0)
    n = E["shown"]
    return {
        "mse": (missing.mean(0) - truth).square().flatten(1).sum(1).mean().item(),
        "log p": log_prob.mean().item(),
        "classified": calibration(probs, y),
        "truth": as_text(x[:n]),
        "filled": [as_text(line) for line in filled[:, :n]],
        "new": as_text(generated(model, n, x[0])),
    }


def neighbours(model: StochasticAutoencoder, E: dict, x: Tensor, y: Tensor) -> dict[str, list[float]]:
    """Return accuracies by labels a class, one for each repetition."""
    found: dict[str, list[float]] = {}
    for repetition in range(E["repetitions"]):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(repetition))
        for count in E["labels"]:
            own = torch.cat([order[y[order] == c][:count] for c in range(10)])
            rest = order[~torch.isin(order, own)][: E["neighbours tested"]]
            guess = CodeNeighbours(model, x[own], y[own], E["neighbour samples"]).predict(x[rest])
            found.setdefault(str(count), []).append((guess == y[rest]).float().mean().item())
    return found


def latent_map(model: StochasticAutoencoder, S: dict, E: dict, x: Tensor, y: Tensor) -> dict:
    """Return codes of images, and how unsure decoders are around them."""
    codes = reconstructed(model, x, S["samples"]).code
    centre, reach = codes.mean(0), 2 * (codes - codes.mean(0)).abs().amax(0)
    axis = torch.linspace(-1, 1, E["map"])
    grid = torch.cartesian_prod(axis, axis) * reach + centre
    unsure = decoded(model, grid, S["samples"])
    std = (unsure.variance + unsure.noise).mean(1).sqrt().view(E["map"], E["map"])
    return {
        "centre": centre.tolist(),
        "reach": reach.tolist(),
        "codes": [[round(v, 4) for v in row] for row in codes.tolist()],
        "labels": y.tolist(),
        "std": [[round(v, 5) for v in row] for row in std.tolist()],
    }


# Runs


def run_ood(args: argparse.Namespace, S: dict, experiment: str = "ood") -> None:
    E = S["ood"] | S[experiment]
    x, _ = images(args.data, E["data"], "train")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, validation = x[order[: E["train"]]], x[order[E["train"] : E["train"] + E["validation"]]]
    inside, outside = (images(args.data, E[which], "test")[0][: E["test"]] for which in ("data", "outside"))
    sets = {"validation": validation, "inside": inside, "outside": outside}
    trainers = {seed: Trainer(train, S, E, seed, args.cache / experiment) for seed in E["seeds"]}
    for seed, trainer in trainers.items():
        for name, make in MODELS.items():
            keep(args, experiment, name, seed, lambda make=make, trainer=trainer: ood(make(trainer), S, E, sets))


def run_digits(args: argparse.Namespace, S: dict) -> None:
    E = S["digits"]
    x, y = images(args.data, E["data"], "train")
    x_test, y_test = (part[: E["test"]] for part in images(args.data, E["data"], "test"))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    own, other = order[: E["train"]], order[E["train"] : E["train"] + E["validation"]]
    judge = classifier(x[own], y[own], E["classifier epochs"])
    n = E["imputed"]

    def answers(make: Callable, seed: int) -> dict:
        model = make(Trainer(x[own], S, E, seed, args.cache / "digits"))
        return fit_of(reconstructed(model, x_test, S["samples"]), x_test) | told(model) | {
            "imputation": imputation(model, E, x_test[:n], y_test[:n], judge),
            "neighbours": neighbours(model, E, x[other], y[other]),
            "map": latent_map(model, S, E, x_test[:500], y_test[:500]),
        }  # fmt: skip

    with torch.no_grad():
        seen = judge(torch.where(lower_half(), x_test[:n], torch.zeros(()))).softmax(-1)
    keep(args, "digits", "classifier", 0, lambda: {"classified": calibration(seen, y_test[:n])})
    for seed in E["seeds"]:
        for name, make in MODELS.items():
            keep(args, "digits", name, seed, lambda make=make, seed=seed: answers(make, seed))


def keep(args: argparse.Namespace, experiment: str, name: str, seed: int, work: Callable[[], dict]) -> None:
    if args.models and name not in args.models:
        return
    slug = name.lower().replace(",", "").replace(" ", "-")
    path = args.out / f"autoencoders-{experiment}-{slug}-{seed}.json"
    with claimed(args.cache / path.stem, wait=False) as ours:
        if ours:
            found = kept(path, work, experiment=experiment, model=name, seed=seed, command=args.command)
            print(path.stem, {k: round(v, 3) for k, v in found.items() if isinstance(v, float)}, flush=True)


def main() -> None:
    args, S = command_line(
        __doc__, "autoencoders", SMALL, only=("ood", "fewer", "digits"), models=(*MODELS, "classifier")
    )
    if not args.report:
        for experiment in args.only:
            run_digits(args, S) if experiment == "digits" else run_ood(args, S, experiment)
    print(report(args.out, S, [*MODELS, "classifier"]))


if __name__ == "__main__":
    main()
