"""A likelihood of your own: a sensor that saturates.

Readings above 1 come out as 1. A Gaussian likelihood takes them at their word; the censored one below, ten lines of
log p, knows that they are at least that. Residual and curvature follow by differentiation.

    python examples/own_likelihood.py --output demo
"""

import math

import torch
from torch import Tensor
from workbench import BLUE, RED, arguments, band, mlp, plt

import ntkgp

LIMIT, NOISE = 1.0, 0.15  # where the sensor saturates; the standard deviation of its noise


class Censored(ntkgp.likelihoods.Likelihood):
    """y = min(f + noise, limit): a density below the limit, the probability of more at the limit."""

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:  # (N, C), (..., N, C) -> (..., N)
        """Return log p(y | f)."""
        z = (y - f) / NOISE
        seen = -z.square() / 2 - math.log(NOISE * math.sqrt(2 * math.pi))
        return torch.where(y < LIMIT, seen, torch.special.log_ndtr(-z)).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw y given f."""
        return (f + NOISE * torch.randn(f.shape, generator=generator, dtype=f.dtype)).clamp(max=LIMIT)


def truth(x: Tensor) -> Tensor:
    return 1.6 * torch.exp(-x.square())


def main() -> None:
    args = arguments(__doc__)
    torch.manual_seed(0)
    x = torch.linspace(-2.5, 2.5, 60).double().unsqueeze(1)
    y = (truth(x) + NOISE * torch.randn_like(x)).clamp(max=LIMIT)
    grid = torch.linspace(-3, 3, 201).double().unsqueeze(1)
    epochs = 150 if args.small else 1500

    figure, axes = plt.subplots(1, 2, figsize=(7.6, 2.8), sharey=True, layout="constrained")
    likelihoods = {"Gaussian": ntkgp.likelihoods.Gaussian(NOISE**2, learn_noise=False), "Censored": Censored()}
    for ax, color, (name, likelihood) in zip(axes, (RED, BLUE), likelihoods.items(), strict=True):
        torch.manual_seed(0)
        net = mlp(1, 30, 1).double()
        objective = ntkgp.training.MaximumAPosteriori(net, likelihood)  # −log p as a loss, with weight decay
        objective.fit((x, y), epochs=epochs, lr=1e-2, progress=False)
        post = ntkgp.fit(net, (x, y), likelihood).refine()
        f = post.latent(grid)
        std = f.variance[:, 0].sqrt()
        inside = grid[:, 0].abs() < 2.5
        z = ((truth(grid) - f.mean)[:, 0] / std)[inside]
        peak = f.mean[len(grid) // 2, 0]
        print(f"{name:10}peak {peak:.2f} (truth 1.60)   truth within two s.d. at {(z.abs() < 2).double().mean():.0%}")
        band(ax, grid[:, 0], f.mean[:, 0], std, color)
        ax.plot(grid[:, 0], truth(grid)[:, 0], color="0.2", lw=1, ls="--", label="truth")
        ax.plot(x[:, 0], y[:, 0], ".", color="0.2", ms=3)
        ax.set(title=name, xlabel="x", ylim=(-0.8, 2.6))
    axes[0].legend(loc="upper left")
    figure.savefig(args.output / "own_likelihood.png", dpi=150)
    print(f"figure: {args.output}/own_likelihood.png")


if __name__ == "__main__":
    main()
