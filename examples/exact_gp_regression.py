"""Exact GP regression with a trained network's tangent kernel, on the diabetes data that ships with scikit-learn.

A small network is trained as usual. Linearised at its weights it becomes a GP: its precisions (one a layer) and the
noise are tuned by the marginal likelihood, without a validation set, and its predictions carry error bars.

    python examples/exact_gp_regression.py --output demo
"""

import argparse
import math
import time
import warnings
from pathlib import Path

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # linear_operator scripts its solvers on import
    import gpytorch

import ntkgp

LEVELS = torch.linspace(0.05, 0.95, 19)


class LinearizedGP(gpytorch.models.ExactGP):
    """The linear model of a network, as GPyTorch sees it."""

    def __init__(self, x: Tensor, y: Tensor, lin: ntkgp.Linearization, noise: float):
        likelihood = gpytorch.likelihoods.GaussianLikelihood().to(x)
        likelihood.noise = noise
        super().__init__(x, y, likelihood)
        prior = ntkgp.priors.Grouped(lin, by="layer", precision=1.0, mean=0.0)
        self.mean, self.kernel = ntkgp.LinearizedMean(lin, prior), ntkgp.NTKKernel(lin, prior)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:  # noqa: D102
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


def train_network(x: Tensor, y: Tensor, steps: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(x.shape[1], 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)).to(x)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        (net(x)[:, 0] - y).square().mean().backward()
        optimizer.step()
    return net


def tune(model: LinearizedGP, steps: int) -> float:
    """Maximise the marginal likelihood; the network is differentiated once, the rest is linear algebra."""
    model.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -mll(model(*model.train_inputs), model.train_targets)
        loss.backward()
        optimizer.step()
    return -loss.item() * len(model.train_targets)


def scores(y: Tensor, mean: Tensor, variance: Tensor) -> tuple[float, float, float]:
    """Root mean squared error, mean negative log density, and how often a 90 % interval holds."""
    z = (y - mean) / variance.sqrt()
    nll = 0.5 * (z.square() + variance.log() + math.log(2 * math.pi)).mean()
    return (y - mean).square().mean().sqrt().item(), nll.item(), coverage(z, torch.tensor([0.9])).item()


def coverage(z: Tensor, levels: Tensor) -> Tensor:
    bounds = torch.distributions.Normal(0.0, 1.0).icdf(0.5 + levels / 2)
    return (z.abs().unsqueeze(-1) <= bounds).double().mean(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder for the figure")
    parser.add_argument("--steps", type=int, default=200, help="training steps of the networks")
    parser.add_argument("--tuning-steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="few steps of training and tuning")
    args = parser.parse_args()
    if args.small:
        args.steps, args.tuning_steps = 20, 5
    args.output.mkdir(parents=True, exist_ok=True)

    X, y = (torch.as_tensor(part, dtype=torch.float64) for part in load_diabetes(return_X_y=True))
    X, y = (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(args.seed))
    train, test = order[:300], order[300:]

    start = time.perf_counter()
    net = train_network(X[train], y[train], args.steps, args.seed)
    trained = time.perf_counter() - start
    residual = (net(X[train])[:, 0] - y[train]).square().mean().item()

    start = time.perf_counter()
    lin = ntkgp.Linearization(net, example=X[train])
    model = LinearizedGP(X[train], y[train], lin, noise=residual)
    evidence = tune(model, args.tuning_steps)
    model.eval()
    with torch.no_grad():
        predicted = model.likelihood(model(X[test]))
        f = lin(X[test])[:, 0]
    tuned = time.perf_counter() - start

    rows = {
        "network, residual noise": (f, torch.full_like(f, residual)),
        "linearised GP": (predicted.mean, predicted.variance),
    }
    print(f"diabetes: {len(train)} training points, {len(test)} test points, {lin.num_params} parameters")
    print(f"{'':26}{'RMSE':>8}{'NLL':>8}{'90 % interval holds':>21}")
    for name, (mean, variance) in rows.items():
        rmse, nll, held = scores(y[test], mean, variance)
        print(f"{name:26}{rmse:8.3f}{nll:8.3f}{100 * held:19.1f} %")
    print(f"log evidence {evidence:.1f}; training {trained:.1f} s, linearising, tuning and predicting {tuned:.1f} s")
    print(
        "precisions by layer:",
        {g: round(a, 2) for g, a in zip(lin.groups, model.kernel.prior.precision.tolist(), strict=True)},
    )
    path = args.output / "exact_gp_regression.png"
    draw(path, X[:, 2:3], y, train, args, {n: (y[test] - m) / v.sqrt() for n, (m, v) in rows.items()})
    print(f"figure: {path}")


def draw(
    path: Path, x: Tensor, y: Tensor, train: Tensor, args: argparse.Namespace, residuals: dict[str, Tensor]
) -> None:
    """Left: a network on one input only, with its bands. Right: how often intervals of the models in the table hold."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    away = (x[train, 0] < -0.2) | (x[train, 0] > 0.8)  # leave a gap: error bars must grow in between
    inside, targets = x[train][away], y[train][away]
    net = train_network(inside, targets, args.steps, args.seed)
    noise = (net(inside)[:, 0] - targets).square().mean().item()
    model = LinearizedGP(inside, targets, ntkgp.Linearization(net, example=inside), noise)
    tune(model, args.tuning_steps)
    model.eval()
    grid = torch.linspace(-4, 5, 300, dtype=x.dtype).unsqueeze(1)
    with torch.no_grad():
        q = model(grid)
    mean, std, sigma = q.mean, q.variance.sqrt(), model.likelihood.noise.sqrt()

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2), layout="constrained")
    t = grid[:, 0]
    outer = (std.square() + sigma.square()).sqrt().detach()
    left.fill_between(t, mean - 2 * outer, mean + 2 * outer, color="#2a6f97", alpha=0.15, lw=0, label="± 2 s.d. of y")
    left.fill_between(t, mean - 2 * std, mean + 2 * std, color="#2a6f97", alpha=0.35, lw=0, label="± 2 s.d. of f")
    left.plot(t, mean, color="#013a63", label="mean")
    left.plot(inside[:, 0], targets, ".", color="0.25", ms=4, alpha=0.6, label="training data")
    left.set(xlabel="body mass index (standardised)", ylabel="progression", xlim=(-4, 5), ylim=(-4.5, 4.5))
    left.set_title("a network on one input, seen as a GP")
    left.legend(loc="lower left", ncols=2, fontsize=8, frameon=False)
    right.plot([0, 1], [0, 1], color="0.7", lw=1)
    for (name, z), color in zip(residuals.items(), ("#c44536", "#013a63"), strict=True):
        right.plot(LEVELS, coverage(z, LEVELS), "o-", ms=3, color=color, label=name)
    right.set(xlabel="nominal coverage", ylabel="observed on test data", xlim=(0, 1), ylim=(0, 1))
    right.set_title("all ten inputs: do intervals hold?")
    right.legend(fontsize=8, frameon=False)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
