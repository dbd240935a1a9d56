"""BoTorch over a network: the surrogate is a small network, its posterior says where to look next.

Every round the network is trained anew on what has been seen, linearised, tuned by evidence and refined: then it is a
Gaussian process, and `qLogExpectedImprovement` is optimised over it by gradients. Random search for comparison.

    python examples/bayesian_optimisation.py --output demo
"""

import warnings

import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from torch import Tensor
from torch.nn.functional import mse_loss
from workbench import BLUE, GREY, RED, arguments, mlp, plt, train

import ntkgp
from ntkgp.interop import BotorchModel

BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
BEST = -0.3978873577  # of Branin's function, at three places


def branin(x: Tensor) -> Tensor:  # (n, 2) -> (n, 1)
    """Return minus Branin's function on the unit square."""
    a, b = 15 * x[:, 0] - 5, 15 * x[:, 1]
    valley = (b - 5.1 / (4 * torch.pi**2) * a**2 + 5 / torch.pi * a - 6) ** 2
    return -(valley + 10 * (1 - 1 / (8 * torch.pi)) * a.cos() + 10).unsqueeze(1)


def surrogate(x: Tensor, y: Tensor, steps: int) -> tuple[BotorchModel, Tensor]:
    """Return the posterior of a network trained on the data, and the largest target in its units."""
    scaled = (y - y.mean()) / y.std()
    net = train(mlp(2, 50, 1).double(), 4 * x - 2, scaled, mse_loss, steps)
    net = torch.nn.Sequential(Scale(), net)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the mode of the linear model gains")  # the mean moves there at once
        exact = ntkgp.likelihoods.Gaussian(1e-4, learn_noise=False)
        post = ntkgp.fit(net, (x, scaled), exact).refine()
    return BotorchModel(post), scaled.max()


class Scale(torch.nn.Module):
    """The unit square to [−2, 2]²."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return 4 * x - 2


def main() -> None:
    args = arguments(__doc__)
    first, rounds, steps = (6, 3, 50) if args.small else (6, 24, 300)
    torch.manual_seed(0)
    x = torch.rand(first, 2).double()
    y = branin(x)
    sampler = SobolQMCNormalSampler(torch.Size([64]), seed=0)
    for _ in range(rounds):
        model, best = surrogate(x, y, steps)
        acquisition = qLogExpectedImprovement(model, best, sampler)
        new, _ = optimize_acqf(acquisition, BOUNDS, q=1, num_restarts=4, raw_samples=64)
        x, y = torch.cat([x, new]), torch.cat([y, branin(new)])
    random = branin(torch.rand(20, len(x), 2).double().flatten(0, 1)).view(20, len(x)).cummax(1).values

    print(f"{len(x)} evaluations; the maximum is {BEST:.3f}")
    print(f"network    {y.max().item():8.3f}\nrandom     {random[:, -1].median().item():8.3f} (median of 20 runs)")
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 2.9), layout="constrained")
    side = torch.linspace(0, 1, 80).double()
    surface = branin(torch.cartesian_prod(side, side)).view(80, 80).mT
    left.contourf(side, side, surface, levels=-torch.logspace(2.5, -0.3, 18).numpy(), cmap="Blues", extend="max")
    left.plot(*x[:first].T, ".", color=GREY, label="first points")
    left.scatter(*x[first:].T, c=RED, s=14, alpha=torch.linspace(0.3, 1, len(x) - first).tolist(), label="chosen")
    left.set(xticks=[], yticks=[], title="minus Branin's function")
    left.legend(loc="upper right", fontsize=8)
    count, quartiles = range(1, len(x) + 1), torch.tensor([0.25, 0.75]).double()
    right.fill_between(count, *(BEST - random).quantile(quartiles, 0), color=GREY, alpha=0.2, lw=0)
    right.plot(count, (BEST - random).median(0).values, color=GREY, label="random search")
    right.plot(count, BEST - y[:, 0].cummax(0).values, color=BLUE, label="network surrogate")
    right.set(yscale="log", xlabel="evaluations", ylabel="distance from the maximum")
    right.legend()
    figure.savefig(args.output / "bayesian_optimisation.png", dpi=150)
    print(f"figure: {args.output}/bayesian_optimisation.png")


if __name__ == "__main__":
    main()
