"""Inside a GPyTorch model: classes by an ApproximateGP whose kernel is a network's, trained with GPyTorch's own bound.

Kernel, mean and likelihood are ours, the model, the variational distribution and the bound are GPyTorch's. Stock
strategies take an inducing point for one value; with C outputs it has C of them, hence the strategy.

    python examples/approximate_gp.py --output demo
"""

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.variational import CholeskyVariationalDistribution
from torch import Tensor
from torch.nn.functional import cross_entropy
from workbench import arguments, mlp, plt, train

import ntkgp


class Model(gpytorch.models.ApproximateGP):
    """f(x; θ*) + J(x)(θ − θ*) through inducing values."""

    def __init__(self, lin: ntkgp.Linearization, prior: ntkgp.priors.Prior, Z: Tensor):
        q = CholeskyVariationalDistribution(len(Z) * lin.num_outputs)
        super().__init__(ntkgp.MultiOutputVariationalStrategy(self, Z, q, learn_inducing_locations=False))
        self.mean, self.kernel = ntkgp.LinearizedMean(lin, prior, at="map"), ntkgp.NTKKernel(lin, prior)

    def forward(self, x: Tensor) -> MultitaskMultivariateNormal:  # noqa: D102
        return MultitaskMultivariateNormal(self.mean(x), self.kernel(x))


def spirals(n: int) -> tuple[Tensor, Tensor]:
    """Three arms of n points each."""
    r = torch.linspace(0.2, 1, n).double().repeat(3)
    arm = torch.arange(3).repeat_interleave(n)
    angle = 3 * r + 2 * torch.pi / 3 * arm + 0.15 * torch.randn(3 * n).double()
    return 3 * r.unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], dim=1), arm


def main() -> None:
    args = arguments(__doc__)
    torch.manual_seed(0)
    x, y = spirals(30 if args.small else 60)
    net = train(mlp(2, 30, 30, 3).double(), x, y, cross_entropy, steps=200 if args.small else 1000, decay=1e-3)

    lin = ntkgp.Linearization(net, example=x)
    prior = ntkgp.priors.Isotropic.from_weight_decay(lin, 1e-3, num_data=len(x))
    model, likelihood = Model(lin, prior, x[:: len(x) // 15]).double(), ntkgp.likelihoods.Categorical()
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(x))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)  # q, and the prior's precision
    bounds = []
    for _ in range(10 if args.small else 300):
        optimizer.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        optimizer.step()
        bounds.append(-loss.item() * len(x))
    model.eval()

    n = 25 if args.small else 80
    side = torch.linspace(-4, 4, n).double()
    with torch.no_grad():
        order = torch.randperm(n * n)  # neighbours that are drawn together would share their noise
        parts = [model(part).rsample(torch.Size([200])) for part in torch.cartesian_prod(side, side)[order].split(n)]
        p = torch.cat(parts, dim=1).softmax(-1).mean(0)[order.argsort()]
        accuracy = (model(x).mean.argmax(-1) == y).double().mean()
    print(f"{len(x)} points, {len(model.variational_strategy.inducing_points)} inducing points of 3 values each")
    print(f"bound on the log evidence: {bounds[0]:.1f} at first, {bounds[-1]:.1f} at last")
    print(f"training accuracy: {accuracy:.2f}")

    figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.9), sharey=True, layout="constrained")
    entropy = -(p * p.clamp(min=1e-12).log()).sum(-1)
    axes[0].imshow(0.3 + 0.7 * p.view(n, n, 3).transpose(0, 1).numpy(), origin="lower", extent=(-4, 4, -4, 4))
    shown = axes[1].imshow(entropy.view(n, n).mT.numpy(), origin="lower", extent=(-4, 4, -4, 4), cmap="viridis", vmin=0)
    figure.colorbar(shown, ax=axes[1], shrink=0.8, label="nats")
    Z = model.variational_strategy.inducing_points
    for ax, title in zip(axes, ("class probabilities", "entropy"), strict=True):
        ax.scatter(*x.T, c=y, cmap=plt.matplotlib.colors.ListedColormap(["#a00", "#0a0", "#00a"]), s=6, lw=0)
        ax.plot(*Z.T, "x", color="white", ms=5, mew=1)
        ax.set(title=title, xticks=[], yticks=[])
    figure.savefig(args.output / "approximate_gp.png", dpi=150)
    print(f"figure: {args.output}/approximate_gp.png (crosses: inducing points)")


if __name__ == "__main__":
    main()
