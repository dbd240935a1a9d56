"""The smooth networks that variational Laplace is compared on."""

from torch import Tensor, nn

__all__ = ["NETWORKS", "cnn", "preactivation"]


def cnn() -> nn.Module:
    """Two convolutions and two linear layers, batch normalisation and softplus between them, 106,346 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.BatchNorm2d(16), nn.Softplus()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.Softplus(), nn.Flatten()),
        *(nn.Linear(1568, 64), nn.BatchNorm1d(64), nn.Softplus(), nn.Linear(64, 10)),
    )


class Block(nn.Module):
    """x ↦ shortcut + conv(act(conv(act(x)))), normalised before each activation (He et al. 2016)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.BatchNorm2d(inside), nn.Softplus())
        self.shortcut = nn.Conv2d(inside, outside, 1, stride, bias=False) if stride > 1 else None
        self.branch = nn.Sequential(
            *(nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.Softplus()),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        h = self.before(x)
        return self.branch(h) + (x if self.shortcut is None else self.shortcut(h))


def preactivation() -> nn.Module:
    """A preactivation ResNet of eight layers, 16, 32 and 64 channels at 16², 8² and 4² pixels, 77,850 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
        *(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)),
        *(nn.BatchNorm2d(64), nn.Softplus(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


NETWORKS = {"cnn": cnn, "preactivation": preactivation}
