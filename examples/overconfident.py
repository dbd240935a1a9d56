"""An overconfident classifier, and what its posterior makes of it, on scikit-learn's breast-cancer data.

A small network is trained until it is sure of every training point. Its posterior is one call, with the prior precision
by evidence, no validation set; refined, the mean moves to the mode of the linear model too.

    python examples/overconfident.py --output demo
"""

import argparse
import time
import warnings
from pathlib import Path

import matplotlib as mpl
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

import ntkgp
from ntkgp.report import metrics

mpl.use("Agg")
import matplotlib.pyplot as plt

COLUMNS = {"NLL": ".3f", "ECE": ".3f", "accuracy": ".3f", "Brier": ".3f"}


def train_network(x: Tensor, y: Tensor, steps: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(x.shape[1], 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 2)).to(x)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def predictions(net: nn.Module, x: Tensor, y: Tensor, x_test: Tensor) -> dict[str, ntkgp.posteriors.Prediction]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "the mode of the linear model gains"
        )  # it does: that is the point of refining
        post = ntkgp.fit(net, (x, y), likelihood="categorical")
    return {
        "network": post.predict(x_test, predictive="map"),
        "posterior": post.predict(x_test),
        "refined posterior": post.refine().predict(x_test),
    }


def scores(prediction: ntkgp.posteriors.Prediction, y: Tensor) -> Tensor:
    p = prediction.probs
    nll = -prediction.log_prob(y).mean().item()
    return torch.tensor([nll, metrics.expected_calibration_error(p, y), metrics.accuracy(p, y), metrics.brier(p, y)])


def draw(path: Path, found: dict[str, list[tuple[Tensor, Tensor]]]) -> None:
    """Draw how often the predicted class is right against how sure it was, and how sure it was."""
    figure, axes = plt.subplots(2, len(found), figsize=(7.6, 4.2), sharex=True, sharey="row", layout="constrained")
    edges = torch.linspace(0.5, 1.0, 9)
    for (upper, lower), (name, splits) in zip(axes.T, found.items(), strict=True):
        probs, y = (torch.cat(part) for part in zip(*splits, strict=True))
        confidence, label = probs.max(-1)
        right = (label == y).double()
        bins = torch.bucketize(confidence, edges[1:-1].to(confidence))
        for b in range(len(edges) - 1):
            if (n := int((bins == b).sum())) >= 3:
                mean = right[bins == b].mean()
                error = (mean * (1 - mean) / n).sqrt()
                upper.errorbar(confidence[bins == b].mean(), mean, error, fmt="o", color="tab:blue", markersize=4)
        upper.plot([0.5, 1], [0.5, 1], color="0.6", linewidth=0.8)
        upper.set(title=name, ylim=(0, 1.05))
        lower.hist(confidence.numpy(), edges.numpy(), color="tab:blue", alpha=0.6)
        for ax in (upper, lower):
            ax.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("probability of the predicted class", fontsize="medium")
    axes[0, 0].set_ylabel("how often it is right")
    axes[1, 0].set_ylabel("test points")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder for the figure")
    parser.add_argument("--steps", type=int, default=300, help="training steps of the networks")
    parser.add_argument("--small", action="store_true", help="two splits")
    args = parser.parse_args()
    splits = 2 if args.small else 5
    args.output.mkdir(parents=True, exist_ok=True)

    X, y = (torch.as_tensor(part) for part in load_breast_cancer(return_X_y=True))
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    scored: dict[str, list[Tensor]] = {}
    start = time.perf_counter()
    for split in range(splits):
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(split))
        train, test = order[: len(X) // 2], order[len(X) // 2 :]
        x = (X - X[train].mean(0)) / X[train].std(0)
        net = train_network(x[train], y[train], args.steps, seed=split)
        for name, prediction in predictions(net, x[train], y[train], x[test]).items():
            found.setdefault(name, []).append((prediction.probs, y[test]))
            scored.setdefault(name, []).append(scores(prediction, y[test]))
    print(f"breast cancer: {len(train)} training points, {len(test)} test points, mean of {splits} splits ± error")
    print(f"{'':20}" + "".join(f"{name:>16}" for name in COLUMNS))
    for name, rows in scored.items():
        table = torch.stack(rows)
        mean, error = table.mean(0), table.std(0) / splits**0.5
        cells = zip(mean.tolist(), error.tolist(), COLUMNS.values(), strict=True)
        print(f"{name:20}" + "".join(f"{f'{m:{form}} ± {e:{form}}':>16}" for m, e, form in cells))
    draw(args.output / "overconfident.png", found)
    print(f"{time.perf_counter() - start:.0f} s; figure in {args.output}/overconfident.png")


if __name__ == "__main__":
    main()
