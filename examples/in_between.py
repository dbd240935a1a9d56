"""Error bars in between: a network that was trained on two clusters, and what it knows of the gap.

The posterior, one call, knows where there were no data. Under the same prior and noise a diagonal covariance does not:
the gap is told by correlations between weights.

    python examples/in_between.py --output demo
"""

import torch
from torch.nn.functional import mse_loss
from workbench import BLUE, RED, arguments, band, mlp, plt, train

import ntkgp


def main() -> None:
    args = arguments(__doc__)
    torch.manual_seed(0)
    x = torch.cat([torch.linspace(-2, -0.8, 30), torch.linspace(0.9, 2, 30)]).double().unsqueeze(1)
    y = torch.sin(2.5 * x) + 0.1 * torch.randn_like(x)
    net = train(mlp(1, 50, 1).double(), x, y, mse_loss, steps=200 if args.small else 2000)

    grid = torch.linspace(-3, 3, 241).double().unsqueeze(1)
    post = ntkgp.fit(net, (x, y), "gaussian", "full", tune=False).tune(at="map")  # judged where the network is
    diagonal = ntkgp.fit(post.lin, (x, y), post.likelihood, "diag", post.prior)
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 2.8), sharey=True, layout="constrained")
    print(f"{'standard deviation of f':24}{'at the data':>14}{'in the gap':>14}")
    for ax, color, q in zip(axes, (BLUE, RED), (post, diagonal), strict=True):
        at, gap = q.latent(x).variance.sqrt().mean(), q.latent(torch.zeros(1, 1).double()).variance.sqrt()
        print(f"{q.method:24}{at:14.3f}{gap.item():14.3f}")
        f = q.latent(grid)
        band(ax, grid[:, 0], f.mean[:, 0], f.variance[:, 0].sqrt(), color)
        ax.plot(x[:, 0], y[:, 0], ".", color="0.2", ms=3)
        ax.set(title=f'method="{q.method}"', xlabel="x", ylim=(-4, 4))
    figure.savefig(args.output / "in_between.png", dpi=150)
    print(f"figure: {args.output}/in_between.png")


if __name__ == "__main__":
    main()
