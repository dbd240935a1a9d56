"""Small networks trained to their mode, as the reproductions need them."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(inputs: int, outputs: int, width: int = 50, depth: int = 1, activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    """Return a network of ``depth`` hidden layers."""
    sizes = [inputs, *[width] * depth]
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def train_regression(net: nn.Module, x: Tensor, y: Tensor, precision: float, steps: int, lr: float = 0.01) -> float:
    """Maximise log p(y, θ) over the weights and the noise by full-batch Adam, cosine schedule; return the noise."""
    log_noise = torch.tensor(math.log(0.1), dtype=x.dtype, requires_grad=True)
    optimizer = torch.optim.Adam([*net.parameters(), log_noise], lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        fit = ((y - net(x)).square() / log_noise.exp() + log_noise).sum() / 2
        penalty = precision / 2 * sum(p.square().sum() for p in net.parameters())
        ((fit + penalty) / len(x)).backward()
        optimizer.step()
        schedule.step()
    return log_noise.exp().item()


def train_classification(net: nn.Module, x: Tensor, y: Tensor, precision: float, steps: int, lr: float = 0.01) -> None:
    """Maximise log p(y, θ) by full-batch Adam with a cosine schedule; one output means one logit."""
    optimizer = torch.optim.Adam(net.parameters(), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        f = net(x)
        if f.shape[1] == 1:
            fit = nn.functional.binary_cross_entropy_with_logits(f[:, 0], y.to(f), reduction="sum")
        else:
            fit = nn.functional.cross_entropy(f, y, reduction="sum")
        penalty = precision / 2 * sum(p.square().sum() for p in net.parameters())
        ((fit + penalty) / len(x)).backward()
        optimizer.step()
        schedule.step()
