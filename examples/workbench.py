"""What the examples share: arguments, a plain training loop, the look of their figures."""

import argparse
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

mpl.use("Agg")
import matplotlib.pyplot as plt

DARK, BLUE, RED, GREY = "#013a63", "#2a6f97", "#c44536", "0.45"
plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})


def arguments(description: str | None, **folders: str) -> argparse.Namespace:
    """Read ``--output``, ``--small`` and the folders or files that an example takes, each with its help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder for the figure")
    parser.add_argument("--small", action="store_true", help="a few seconds, on less or made-up data")
    for name, told in folders.items():
        parser.add_argument(f"--{name}", type=Path, help=told)
    args = parser.parse_args()
    missing = [name for name in folders if getattr(args, name) is None]
    if missing and not args.small:
        parser.error(f"--{missing[0]} is needed, {folders[missing[0]]}; or --small for made-up data")
    args.output.mkdir(parents=True, exist_ok=True)
    return args


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Callable[..., Tensor],
    steps: int,
    lr: float = 1e-2,
    batch: int = 0,
    decay: float = 1e-4,
) -> nn.Module:
    """Minimise the mean loss by Adam, with all points in every step or ``batch`` of them, and a cosine schedule."""
    optimizer = torch.optim.Adam(net.parameters(), lr, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    net.train()
    for _ in range(steps):
        index = torch.randint(len(x), (batch,)) if batch else slice(None)
        optimizer.zero_grad()
        loss(net(x[index]), y[index]).backward()
        optimizer.step()
        schedule.step()
    return net.eval()


def mlp(*sizes: int) -> nn.Sequential:
    """Return a network of linear layers with tanh between them."""
    layers: list[nn.Module] = []
    for d_in, d_out in pairwise(sizes):
        layers += [nn.Linear(d_in, d_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def band(ax: Axes, t: Tensor, mean: Tensor, std: Tensor, color: str = BLUE, **label: Any) -> None:
    """Draw a mean with two standard deviations around it."""
    ax.fill_between(t, mean - 2 * std, mean + 2 * std, color=color, alpha=0.25, lw=0)
    ax.plot(t, mean, color=color, **label)
