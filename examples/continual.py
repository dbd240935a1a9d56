"""Today's posterior is tomorrow's prior: data that arrive in pieces, by `update`.

A network was trained on last year's curve; this year's arrives in four pieces. Each `update` grows the factor of B by a
block, no earlier point is looked at again, and the last posterior is that of all data at once, to rounding. `refine`
moves the mean; where nothing has arrived yet it stays with the network, and the band says so.

    python examples/continual.py --output demo
"""

import torch
from torch.nn.functional import mse_loss
from workbench import BLUE, GREY, arguments, band, mlp, plt, train

import ntkgp


def main() -> None:
    args = arguments(__doc__)
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 80).double().unsqueeze(1)
    y = torch.sin(3 * x) + 0.1 * torch.randn_like(x)
    pieces = list(zip(x.split(20), y.split(20), strict=True))
    net = train(mlp(1, 50, 1).double(), x, torch.sin(3 * x + 0.6), mse_loss, steps=100 if args.small else 1000)

    lin = ntkgp.Linearization(net, example=x)
    likelihood, prior = ntkgp.likelihoods.Gaussian(0.01), ntkgp.priors.Isotropic(lin, 10.0, mean="map")
    post = ntkgp.fit(lin, pieces[0], likelihood, "function", prior)
    posts = [post] + [post := post.update(*piece) for piece in pieces[1:]]
    at_once = ntkgp.fit(lin, (x, y), likelihood, "function", prior)

    grid = torch.linspace(-2.5, 2.5, 201).double().unsqueeze(1)
    figure, axes = plt.subplots(1, 4, figsize=(10, 2.4), sharey=True, layout="constrained")
    for k, (ax, post) in enumerate(zip(axes, posts, strict=True)):
        f = post.refine().latent(grid)
        seen = 20 * (k + 1)
        inside = grid[:, 0].abs() <= 2
        rmse = (f.mean - torch.sin(3 * grid))[inside].square().mean().sqrt()
        print(f"{seen:3} points: log evidence {post.log_evidence().item():7.2f}, RMSE over [−2, 2] {rmse:.3f}")
        ax.plot(grid[:, 0], net(grid)[:, 0].detach(), color=GREY, ls="--", lw=1, label="the network")
        band(ax, grid[:, 0], f.mean[:, 0], f.variance[:, 0].sqrt(), BLUE)
        ax.plot(x[:seen, 0], y[:seen, 0], ".", color="0.2", ms=3)
        ax.set(title=f"{seen} points", ylim=(-2.2, 2.2), xlabel="x")
    axes[0].legend(loc="lower left", fontsize=8)
    gap = (posts[-1].latent(grid).variance - at_once.latent(grid).variance).abs().max()
    print(f"largest difference in variance from all data at once: {gap:.1e}")
    figure.savefig(args.output / "continual.png", dpi=150)
    print(f"figure: {args.output}/continual.png")


if __name__ == "__main__":
    main()
