"""Figures: the banana data (Fig. 4 of the paper), and posteriors of small networks in one dimension.

python benchmarks/reproduce/figures.py --data DIR [--out DIR]
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from modes import mlp, train_classification, train_regression
from torch import Tensor, nn

import ntkgp

sys.path.insert(0, str(Path(__file__).parent.parent))
from harness import commit, machine

mpl.use("Agg")
PRECISION = 0.5  # of every weight, while training and, unless evidence says otherwise, in the posterior
plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 150})


# The banana: means and the two parts of the variance, sampled weights against the linear model


def banana(data: Path, out: Path) -> dict:
    """Draw mean, aleatoric and epistemic standard deviation of the label, BNN above GLM."""
    with np.load(data / "uci_classification/banana.npz") as raw:
        X, y = torch.as_tensor(raw["X"]).double(), torch.as_tensor(raw["y"]).long()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(X), generator=generator)
    train, test = order[:300], order[300:]
    torch.manual_seed(0)
    net = mlp(2, 1, depth=2).double()
    train_classification(net, X[train], y[train], precision=1.0, steps=3000)
    prior = ntkgp.Linearization(net, example=X[:2])
    post = ntkgp.fit(prior, (X[train], y[train]), "bernoulli", "function", ntkgp.priors.Isotropic(prior, 1.0))
    side = torch.linspace(-4, 4, 90).double()
    grid = torch.cartesian_prod(side, side)
    figure, axes = plt.subplots(2, 3, figsize=(7.4, 4.6), sharex=True, sharey=True, layout="constrained")
    found: dict = {}
    for row, predictive in zip(axes, ("bnn", "glm"), strict=True):
        p = post.predict(grid, predictive=predictive, num_samples=1000)
        scores = post.predict(X[test], predictive=predictive, num_samples=500)
        found[predictive] = {
            "test nll": -scores.log_prob(y[test]).mean().item(),
            "accuracy": ((scores.mean[:, 0] > 0.5) == y[test].bool()).double().mean().item(),
        }
        parts = (("mean", p.mean), ("aleatoric", p.aleatoric.sqrt()), ("epistemic", p.epistemic.sqrt()))
        for ax, (name, values) in zip(row, parts, strict=True):
            limits = (0, 1) if name == "mean" else (0, 0.5)
            colours = "RdBu_r" if name == "mean" else "viridis"
            image = values.view(90, 90).mT.numpy()
            shown = ax.imshow(
                image, origin="lower", extent=(-4, 4, -4, 4), vmin=limits[0], vmax=limits[1], cmap=colours
            )
            for label, marker in ((0, "o"), (1, "^")):
                points = X[train][y[train] == label]
                ax.plot(*points.mT, marker, color="k", markersize=1.4, alpha=0.5, markeredgewidth=0)
            ax.set(xlim=(-4, 4), ylim=(-4, 4), xticks=(), yticks=())
            if predictive == "bnn":
                ax.set_title({"mean": "mean", "aleatoric": "aleatoric std", "epistemic": "epistemic std"}[name])
            figure.colorbar(shown, ax=ax, shrink=0.85)
        row[0].set_ylabel(f"{predictive.upper()}, test NLL {found[predictive]['test nll']:.2f}")
    figure.savefig(out / "banana.png")
    return found


# One dimension


def snelson(data: Path, gap: bool = True) -> tuple[Tensor, Tensor]:
    """Snelson's data, without their middle if there is to be a gap."""
    with np.load(data / "toy/snelson.npz") as raw:
        x, y = torch.as_tensor(raw["x"]).double(), torch.as_tensor(raw["y"]).double()
    kept = (x < 1.8) | (x > 4.2) | (not gap)
    x, y = x[kept], y[kept]
    return ((x - 3) / 1.8)[:, None], (y / y.std())[:, None]


def band(ax: Axes, post: ntkgp.Posterior, x: Tensor, y: Tensor, title: str, predictive: str = "glm") -> float:
    """Draw data, mean and two standard deviations; return the mean epistemic standard deviation in the gap."""
    grid = torch.linspace(-2.6, 2.6, 261).double()[:, None]
    p = post.predict(grid, predictive=predictive, num_samples=500)
    mean, epistemic, total = p.mean[:, 0], p.epistemic[:, 0].sqrt(), p.variance[:, 0].sqrt()
    at = grid[:, 0]
    ax.fill_between(at, mean - 2 * total, mean + 2 * total, color="tab:blue", alpha=0.12, linewidth=0)
    ax.fill_between(at, mean - 2 * epistemic, mean + 2 * epistemic, color="tab:blue", alpha=0.3, linewidth=0)
    ax.plot(at, mean, color="tab:blue", linewidth=1.2)
    ax.plot(x[:, 0], y[:, 0], ".", color="k", markersize=2, alpha=0.6)
    ax.set(xlim=(-2.6, 2.6), ylim=(-4, 4), title=title)
    return epistemic[(at > -0.5) & (at < 0.5)].mean().item()


def trained(x: Tensor, y: Tensor, width: int, depth: int = 1) -> tuple:
    torch.manual_seed(0)
    net = mlp(1, 1, width, depth).double()
    noise = train_regression(net, x, y, precision=PRECISION, steps=4000)
    lin = ntkgp.Linearization(net, example=x)
    return lin, noise


def in_between(data: Path, out: Path) -> dict:
    """Draw BNN against GLM, structures, and a small network with and without evidence."""
    x, y = snelson(data)
    lin, noise = trained(x, y, 50, depth=2)
    found: dict = {}

    def fit(method: str, lin: ntkgp.Linearization = lin, noise: float = noise, **options: object) -> ntkgp.Posterior:
        likelihood = ntkgp.likelihoods.Gaussian(noise).double()
        prior = ntkgp.priors.Isotropic(lin, PRECISION)
        return ntkgp.fit(lin, (x, y), likelihood, method, prior, **options)

    full = fit("full")
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 2.5), sharey=True, layout="constrained")
    found["GLM"] = band(axes[0], full, x, y, "linear model (GLM)")
    found["BNN"] = band(axes[1], full, x, y, "weights into the network (BNN)", "bnn")
    figure.savefig(out / "in_between.png")

    figure, axes = plt.subplots(1, 4, figsize=(9.6, 2.4), sharey=True, layout="constrained")
    P = lin.num_params
    size = P // 10
    structures = (
        ("full", full),
        ("Kronecker", fit("kron")),
        (f"subnetwork ({size} of {P})", fit("subnetwork", subnetwork=size)),
        ("diagonal", fit("diag")),
    )
    for ax, (name, post) in zip(axes, structures, strict=True):
        found[name] = band(ax, post, x, y, name)
    figure.savefig(out / "structures.png")

    small, noise = trained(x, y, 6)
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 2.5), sharey=True, layout="constrained")
    found["1-6-1"] = band(axes[0], fit("full", small, noise), x, y, f"1-6-1, precision {PRECISION:g}")
    likelihood = ntkgp.likelihoods.Gaussian(noise).double()
    tuned = ntkgp.fit(small, (x, y), likelihood, "full", ntkgp.priors.Grouped(small, precision=PRECISION), tune=True)
    found["1-6-1, evidence"] = band(axes[1], tuned, x, y, "1-6-1, precisions and noise by evidence")
    figure.savefig(out / "evidence.png")
    return found


def sparse(data: Path, out: Path) -> dict:
    """Draw the exact posterior of Snelson's data beside those of 10, 15 and 20 inducing values, with free means."""
    x, y = snelson(data, gap=False)
    lin, noise = trained(x, y, 50, depth=2)

    def fit(method: str, **options: object) -> ntkgp.Posterior:
        likelihood, prior = ntkgp.likelihoods.Gaussian(noise).double(), ntkgp.priors.Isotropic(lin, PRECISION)
        return ntkgp.fit(lin, (x, y), likelihood, method, prior, **options)

    exact = fit("function").refine()
    figure, axes = plt.subplots(1, 4, figsize=(10.4, 2.7), sharex=True, sharey=True, layout="constrained")
    found: dict = {"log evidence": exact.log_evidence().item()}
    band(axes[0], exact, x, y, f"exact, log evidence {found['log evidence']:.1f}")
    grid = torch.linspace(-2.6, 2.6, 261).double()[:, None]
    truth = exact.latent(grid)
    for ax, M in zip(axes[1:], (10, 15, 20), strict=True):
        post = fit("variational", num_inducing=M, mean="linear", inducing="greedy")
        q = post.latent(grid)
        found[f"{M} values"] = {
            "bound": post.log_evidence().item(),
            "largest difference of means": (q.mean - truth.mean).abs().max().item(),
            "largest difference of stds": (q.stddev - truth.stddev).abs().max().item(),
        }
        band(ax, post, x, y, f"{M} values, bound {found[f'{M} values']['bound']:.1f}")
        at = post.inducing.x[:, 0]
        ax.plot(at, torch.full_like(at, -3.8), "|", color="tab:red", markersize=7)
    figure.savefig(out / "sparse.png")
    return found


def normalised(data: Path, out: Path) -> dict:
    """Draw a network with BatchNorm: precisions and noise by evidence at θ* and at θ_⋆, one or one for each group."""
    x, y = snelson(data)
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Linear(1, 50), nn.BatchNorm1d(50), nn.Tanh(), nn.Linear(50, 50), nn.BatchNorm1d(50), nn.Tanh()),
        nn.Linear(50, 1),
    ).double()
    optimizer = torch.optim.Adam(net.parameters(), 0.01, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
    for _ in range(500):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        schedule.step()
    net.eval()
    noise = nn.functional.mse_loss(net(x), y).item()
    lin = ntkgp.Linearization(net, example=x)
    figure, axes = plt.subplots(1, 3, figsize=(9.6, 2.5), sharey=True, layout="constrained")
    variants = (
        ("evidence at θ*", "map", ntkgp.priors.Isotropic(lin)),
        ("evidence at the linear mode", "linear_mode", ntkgp.priors.Isotropic(lin)),
        ("at the linear mode, by group", "linear_mode", ntkgp.priors.Grouped(lin, by="normalized")),
    )
    found: dict = {}
    for ax, (name, at, prior) in zip(axes, variants, strict=True):
        likelihood = ntkgp.likelihoods.Gaussian(noise, learn_noise=False).double()
        post = ntkgp.fit(lin, (x, y), likelihood, "function", prior).tune(at=at)
        gap = band(ax, post, x, y, name)
        held = post.predict(x).log_prob(y).mean().item()
        found[name] = {
            "epistemic std in the gap": gap,
            "train log density": held,
            "precision": post.prior.precision.tolist(),
            "log evidence": post.log_evidence(at).item(),
        }
    figure.savefig(out / "normalised.png")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("docs/results/figures"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    results = {
        "banana": banana(args.data, args.out),
        "epistemic std in the gap": in_between(args.data, args.out),
        "BatchNorm": normalised(args.data, args.out),
        "inducing values": sparse(args.data, args.out),
    }
    origin = {"command": "make reproduce-figures", "commit": commit(), "seed": 0, "machine": machine()}
    (args.out / "figures.json").write_text(json.dumps(origin | results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
