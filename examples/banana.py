"""Two kinds of not knowing: the banana data, and the two parts of the variance of a label.

Between the classes the label itself is random (aleatoric); away from the data the network is (epistemic). A network's
own probabilities tell neither from the other.

    python examples/banana.py --data ../shared/data/uci_classification/banana.npz --output demo
"""

import numpy as np
import torch
from sklearn.datasets import make_moons
from torch.nn.functional import binary_cross_entropy_with_logits
from workbench import arguments, mlp, plt, train

import ntkgp

DECAY = 3e-3  # of a mean loss over 300 points: a prior precision of about 1


def main() -> None:
    args = arguments(__doc__, data="the file of the banana data, with X and y")
    torch.manual_seed(0)
    if args.data is None:
        X, y = make_moons(600, noise=0.25, random_state=0)
        X = 1.6 * (X - X.mean(0))
    else:
        with np.load(args.data) as raw:
            X, y = raw["X"], raw["y"]
    X, y = torch.as_tensor(X).double(), torch.as_tensor(y).double().unsqueeze(1)
    order = torch.randperm(len(X))
    train_, test = order[:300], order[300:]
    steps = 200 if args.small else 2000
    net = mlp(2, 50, 50, 1).double()
    train(net, X[train_], y[train_], binary_cross_entropy_with_logits, steps, decay=DECAY)

    lin = ntkgp.Linearization(net, example=X)
    prior = ntkgp.priors.Isotropic.from_weight_decay(lin, DECAY, num_data=len(train_))  # what it was trained with
    post = ntkgp.fit(lin, (X[train_], y[train_].long()), "bernoulli", prior=prior)
    for name, predictive in {"network": "map", "posterior": "glm"}.items():
        prediction = post.predict(X[test], predictive=predictive)
        right = ((prediction.mean > 0.5) == (y[test] > 0.5)).double().mean()
        print(f"{name:10}NLL {-prediction.log_prob(y[test].long()).mean():.3f}   accuracy {right:.3f}")

    n = 30 if args.small else 90
    side = torch.linspace(-4, 4, n).double()
    p = post.predict(torch.cartesian_prod(side, side), num_samples=2000)
    parts = {"P(y = 1)": p.mean, "aleatoric s.d.": p.aleatoric.sqrt(), "epistemic s.d.": p.epistemic.sqrt()}
    figure, axes = plt.subplots(1, 3, figsize=(8.6, 2.7), sharey=True, layout="constrained")
    for ax, (name, values) in zip(axes, parts.items(), strict=True):
        colours, top = ("RdBu_r", 1) if name.startswith("P") else ("viridis", 0.5)
        image = values.view(n, n).mT.numpy()
        shown = ax.imshow(image, origin="lower", extent=(-4, 4, -4, 4), cmap=colours, vmin=0, vmax=top)
        ax.scatter(*X[train_].T, c=y[train_, 0], cmap="RdBu_r", s=7, lw=0.3, edgecolors="white")
        ax.set(title=name, xticks=[], yticks=[], xlim=(-4, 4), ylim=(-4, 4))
        figure.colorbar(shown, ax=ax, shrink=0.8)
    figure.savefig(args.output / "banana.png", dpi=150)
    print(f"figure: {args.output}/banana.png")


if __name__ == "__main__":
    main()
