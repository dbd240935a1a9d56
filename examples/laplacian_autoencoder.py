"""An autoencoder that knows what it has not seen, on the digits that ship with scikit-learn.

Encoder and decoder are trained as usual and given a Gaussian over their weights post hoc, then trained on with it
online, so that networks drawn from it reconstruct better. Such networks disagree about images unlike those they were
trained on, in the code as in the output; a plain autoencoder, asked the same, has nothing to disagree about.

    python examples/laplacian_autoencoder.py --output demo
"""

import argparse
import time
from copy import deepcopy
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ntkgp
from ntkgp.report.metrics import ood_auc
from ntkgp.training.autoencoders import (
    LaplacianAutoencoder,
    PlainAutoencoder,
    StochasticAutoencoder,
    decoded,
    ood_scores,
    reconstructed,
)

mpl.use("Agg")
NOISE, RATE = 0.05, 2e-3  # variance of a pixel between 0 and 1
SCORES = ("latent variance", "output variance")


def models(x: Tensor, epochs: int) -> dict[str, StochasticAutoencoder]:
    torch.manual_seed(0)
    hidden = nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh()
    encoder = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(32, 2))
    decoder = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64))
    noise = ntkgp.likelihoods.Gaussian(NOISE, learn_noise=False)
    plain = PlainAutoencoder(encoder, decoder, noise)
    plain.fit(x, epochs, batch_size=64, lr=RATE)
    found: dict[str, StochasticAutoencoder] = {"plain": plain}
    for name in ("Laplace, post hoc", "Laplace, online"):
        lae = LaplacianAutoencoder(deepcopy(encoder), deepcopy(decoder), noise, alpha=1e-3)
        lae.post_hoc(x)  # curvature, by one pass over the data
        lae.tune()  # the prior, by evidence
        found[name] = lae
    lae.fit(x, epochs, batch_size=64, lr=RATE / 4)
    return found


def draw(path: Path, found: dict[str, StochasticAutoencoder], x: Tensor, y: Tensor, samples: int) -> None:
    """Draw codes of test images over the standard deviation of what networks decode around them."""
    figure, axes = plt.subplots(1, len(found), figsize=(3.4 * len(found), 3), layout="constrained", squeeze=False)
    for ax, (name, model) in zip(axes[0], found.items(), strict=True):
        z = reconstructed(model, x, samples).code
        centre, reach = z.mean(0), 2 * (z - z.mean(0)).abs().amax(0)
        axis = torch.linspace(-1, 1, 30)
        std = decoded(model, torch.cartesian_prod(axis, axis) * reach + centre, samples).variance.mean(1).sqrt()
        low, high = centre - reach, centre + reach
        extent = (low[0].item(), high[0].item(), low[1].item(), high[1].item())
        image = ax.imshow(std.view(30, 30).T.numpy(), origin="lower", extent=extent, aspect="auto")
        ax.scatter(*z.T.numpy(), c=y.numpy(), cmap="tab10", s=4)
        ax.set_title(name)
        figure.colorbar(image, ax=ax)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder for the figure")
    parser.add_argument("--small", action="store_true", help="a few epochs only")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    epochs, samples = (4, 10) if args.small else (60, 100)

    start, digits = time.perf_counter(), load_digits()
    x, y = torch.tensor(digits.images / 16).float().unsqueeze(1), torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    outside = {"negatives": 1 - x[test], "upside down": x[test].flip(2)}

    found = models(x[train], epochs)
    print(
        f"{len(train)} digits to train on, {len(test)} to test; how often a foreign one has the larger variance (AUROC)"
    )
    columns = [f"{name}: {score.split()[0]}" for name in outside for score in SCORES]
    print(f"{'':20}{'error':>7}{'log p':>8}{'of each':>9}" + "".join(f"{column:>22}" for column in columns))
    for name, model in found.items():
        inside = reconstructed(model, x[test], samples)
        error = (inside.mean - x[test].flatten(1)).square().sum(1).mean()
        line = f"{name:20}{error:7.2f}{inside.log_prob.mean():8.2f}{inside.expected_log_prob.mean():9.2f}"
        for images in outside.values():
            own, other = (ood_scores(look, inside) for look in (inside, reconstructed(model, images, samples)))
            line += "".join(f"{ood_auc(own[score], other[score]):22.3f}" for score in SCORES)
        print(line)
    unsure = {name: model for name, model in found.items() if name != "plain"}
    draw(args.output / "laplacian_autoencoder.png", unsure, x[test], y[test], samples)
    print(f"{time.perf_counter() - start:.0f} s; figure in {args.output}/laplacian_autoencoder.png")


if __name__ == "__main__":
    main()
