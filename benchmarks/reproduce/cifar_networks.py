"""Networks that are trained on from the pretrained ResNet-20, on the CIFAR-10 images that are there."""

import math
import time
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn

__all__ = ["DECAY", "Members"]

DECAY, RATE, EPOCHS, BATCH = 1e-4, 0.05, 8, 128  # decay and momentum as the network was trained, half its first rate
DROPOUT = 0.1  # before the second convolution of each block (Zagoruyko & Komodakis 2016)


def moved(x: Tensor, generator: torch.Generator) -> Tensor:  # (N, 3, 32, 32)
    """Return images shifted by up to four pixels and mirrored, each at random, as the network was trained on them."""
    N, _, H, W = x.shape
    wide = nn.functional.pad(x, (4, 4, 4, 4))
    down, right, mirror = (torch.randint(k, (N, 1), generator=generator) for k in (9, 9, 2))
    rows, columns = down + torch.arange(H), torch.arange(W)
    columns = right + torch.where(mirror.bool(), W - 1 - columns, columns)
    return wide[torch.arange(N)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Members:
    """Networks that SGD with warm restarts finds from the first one (Huang et al. 2017), kept on disk."""

    def __init__(self, first: nn.Module, x: Tensor, y: Tensor, cache: Path) -> None:
        self.first, self.x, self.y, self.cache = first, x, y, cache
        cache.mkdir(parents=True, exist_ok=True)

    def get(self, seed: int, dropout: bool = False) -> nn.Module:
        """Return a network, trained now if it is not there."""
        net, path = deepcopy(self.first), self.cache / f"{'dropout' if dropout else 'member'}-{seed}.pt"
        if dropout:
            for block in net.blocks:
                block.conv2 = nn.Sequential(nn.Dropout(DROPOUT), block.conv2)
        if path.exists():
            net.load_state_dict(torch.load(path, weights_only=True))
            return net.eval()
        start = time.perf_counter()
        self.train(net, seed)
        torch.save(net.state_dict(), path)
        print(f"trained {path.stem}: {time.perf_counter() - start:.0f} s", flush=True)
        return net

    def train(self, net: nn.Module, seed: int) -> None:
        """Train on, from a large rate down to none, with the statistics of batches."""
        torch.manual_seed(seed)  # of dropout
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.SGD(net.parameters(), RATE, momentum=0.9, weight_decay=DECAY)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * math.ceil(len(self.x) / BATCH))
        net.train()
        for _ in range(EPOCHS):
            for index in torch.randperm(len(self.x), generator=generator).split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(moved(self.x[index], generator)), self.y[index]).backward()
                optimizer.step()
                schedule.step()
        net.eval()
