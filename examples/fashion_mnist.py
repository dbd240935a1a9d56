"""FashionMNIST, and what is not FashionMNIST: do probabilities notice?

A small CNN is trained as usual, and too sure of itself. Its Gaussian process, through 100 inducing values that every
training image has a say in and with the precision by validation, says how sure it may be; digits, which it has never
seen, should make it less sure.

    python examples/fashion_mnist.py --data ../shared/data/images --output demo
"""

from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from workbench import BLUE, GREY, RED, arguments, plt, train

import ntkgp
from ntkgp.report import metrics


def lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 84), nn.Tanh(), nn.Linear(84, 10)),
    )


def images(folder: Path | None, name: str, part: str, n: int) -> tuple[Tensor, Tensor]:
    """Return n images in [0, 1], (n, 1, 28, 28), and labels; without a folder digits of 8 x 8, or their negatives."""
    if folder is None:
        x, y = load_digits(return_X_y=True)
        x = interpolate(torch.as_tensor(x).float().view(-1, 1, 8, 8) / 16, (28, 28))
        some = slice(0, n) if part == "train" else slice(-n, None)
        return (x if name == "fashion_mnist" else 1 - x)[some], torch.as_tensor(y)[some]
    with np.load(folder / f"{name}.npz") as raw:
        x, y = torch.as_tensor(raw[f"x_{part}"][:n]), torch.as_tensor(raw[f"y_{part}"][:n]).long()
    return x.float().unsqueeze(1) / 255, y


def main() -> None:
    args = arguments(__doc__, data="the folder with fashion_mnist.npz and mnist.npz")
    n, steps, values, tested = (300, 60, 30, 60) if args.small else (20_000, 4000, 100, 2000)
    torch.manual_seed(0)
    x, y = images(args.data, "fashion_mnist", "train", n)
    inside, labels = images(args.data, "fashion_mnist", "test", tested)
    outside, _ = images(args.data, "mnist", "test", tested)
    net = train(lenet(), x[: -tested // 2], y[: -tested // 2], cross_entropy, steps, lr=3e-3, batch=100)

    held = slice(-tested // 2, None)  # of the training images, for the precision
    options = {"method": "variational", "num_inducing": values, "objective": "nystrom", "tune": False}
    post = ntkgp.fit(net, (x[: -tested // 2], y[: -tested // 2]), "categorical", **options)
    post.tune(validation=(x[held], y[held]))
    print(f"prior precision {post.prior.precision.item():.3g}, by validation on {tested // 2} images")
    print(f"{'':10}{'NLL':>8}{'accuracy':>10}{'ECE':>8}{'OOD-AUC':>9}")
    figure, axes = plt.subplots(1, 2, figsize=(7, 2.5), sharex=True, sharey=True, layout="constrained")
    for ax, (name, predictive) in zip(axes, {"network": "map", "posterior": "glm"}.items(), strict=True):
        p, q = (post.predict(part, predictive=predictive) for part in (inside, outside))
        nll, auc = -p.log_prob(labels).mean(), metrics.ood_auc(p.entropy, q.entropy)
        scores = metrics.accuracy(p.probs, labels), metrics.expected_calibration_error(p.probs, labels)
        print(f"{name:10}{nll:8.3f}{scores[0]:10.3f}{scores[1]:8.3f}{auc:9.3f}")
        for values, color, label in ((p.entropy, BLUE, "inside"), (q.entropy, RED, "outside")):
            ax.hist(values.numpy(), bins=30, range=(0, 2.4), density=True, color=color, alpha=0.5, label=label)
        ax.axvline(np.log(10), color=GREY, lw=1, ls="--")
        ax.set(title=name, xlabel="entropy of the label, nats", yticks=[])
    axes[0].legend()
    figure.savefig(args.output / "fashion_mnist.png", dpi=150)
    print(f"figure: {args.output}/fashion_mnist.png")


if __name__ == "__main__":
    main()
