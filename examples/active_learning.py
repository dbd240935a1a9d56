"""Active learning: label what the network is least sure of, by the epistemic part of its variance.

A posterior in function space takes new labels by `update`: the factor of B grows by a block, nothing is refitted. The
next point is the one of largest epistemic variance under it, so that points are not chosen twice for the same reason.

    python examples/active_learning.py --output demo
"""

import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from workbench import BLUE, GREY, RED, arguments, band, mlp, plt, train

import ntkgp


def truth(x: Tensor) -> Tensor:
    return torch.sin(3 * x) + 0.5 * x


def main() -> None:
    args = arguments(__doc__)
    budget, repeats, steps = (6, 2, 100) if args.small else (16, 10, 800)
    curves: dict[str, list[list[float]]] = {"epistemic": [], "random": []}
    for seed in range(repeats):
        torch.manual_seed(seed)
        pool = 4 * torch.rand(200, 1).double() - 2
        test = torch.linspace(-2, 2, 200).double().unsqueeze(1)
        first = pool[pool[:, 0] < -1][:8]
        y = truth(first) + 0.05 * torch.randn_like(first)
        net = train(mlp(1, 50, 1).double(), first, y, mse_loss, steps)
        for name, curve in curves.items():
            lin = ntkgp.Linearization(net, example=first)
            likelihood, prior = ntkgp.likelihoods.Gaussian(0.05**2), ntkgp.priors.Isotropic(lin, 0.1)
            post = ntkgp.fit(lin, (first, y), likelihood, "function", prior)
            errors, chosen = [], []
            for _ in range(budget):
                errors.append((post.refine().predict(test).mean - truth(test)).square().mean().sqrt().item())
                score = post.predict(pool).epistemic[:, 0] if name == "epistemic" else torch.rand(len(pool))
                new = pool[score.argmax()].unsqueeze(0)
                chosen.append(new)
                post = post.update(new, truth(new) + 0.05 * torch.randn_like(new))
            curve.append(errors)
            if seed == 0 and name == "epistemic":
                shown = post.refine(), first, y, torch.cat(chosen)

    means = {name: torch.tensor(curve).mean(0) for name, curve in curves.items()}
    print(f"root mean squared error over [−2, 2], mean of {repeats} runs that start with 8 labels in [−2, −1]")
    for label in {0, budget // 2, budget - 1}:
        print(f"{label:3} labels more:" + "".join(f"   {name} {mean[label]:.3f}" for name, mean in means.items()))
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 2.8), layout="constrained")
    post, first, y, chosen = shown
    f = post.latent(test)
    band(left, test[:, 0], f.mean[:, 0], f.variance[:, 0].sqrt())
    left.plot(test[:, 0], truth(test)[:, 0], color="0.2", lw=1, ls="--", label="truth")
    left.plot(first[:, 0], y[:, 0], ".", color="0.2", ms=4, label="first labels")
    left.plot(chosen[:, 0], truth(chosen)[:, 0], "o", color=RED, ms=4, label="chosen")
    left.set(xlabel="x")
    left.legend(fontsize=8)
    for (name, curve), color in zip(curves.items(), (BLUE, GREY), strict=True):
        table = torch.tensor(curve)
        band(right, torch.arange(budget), table.mean(0), table.std(0) / repeats**0.5, color, label=name)
    right.set(xlabel="labels more", ylabel="RMSE", ylim=(0, None), xticks=range(0, budget, 3))
    right.legend()
    figure.savefig(args.output / "active_learning.png", dpi=150)
    print(f"figure: {args.output}/active_learning.png")


if __name__ == "__main__":
    main()
