"""The network whose weights stand for an image."""

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["UNet"]

_SLOPE = 0.2  # of the leaky rectifier


class UNet(nn.Module):
    """An encoder and a decoder with narrow skip connections, for deep image priors.

    With three scales, 32 channels and skips of four it has 76,608 convolution weights (Baguer et al. 2020).

    Args:
        channels: of every feature map.
        scales: how many resolutions; each has half as many pixels a side as the one before.
        skip: channels of a skip connection; 0 for none.
        in_channels: of the input image.
        out_channels: of the reconstruction.
        groups: of a GroupNorm after every convolution; None for no norm.
        positive: whether the output passes a sigmoid, so that it lies between 0 and 1.
        dropout: probability that a channel of a convolution is dropped while training; for MC dropout.

    Raises:
        ValueError: if a size cannot be.
    """

    def __init__(
        self,
        channels: int = 32,
        scales: int = 3,
        skip: int = 4,
        in_channels: int = 1,
        out_channels: int = 1,
        groups: int | None = None,
        positive: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, value in (("channels", channels), ("scales", scales)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, but is {value}")
        if groups is not None and channels % groups:
            raise ValueError(f"groups must divide channels, but {channels} channels have no {groups} groups")

        def conv(a: int, b: int, stride: int = 1) -> nn.Sequential:
            norm = [] if groups is None else [nn.GroupNorm(groups, b)]
            drop = [nn.Dropout2d(dropout)] if dropout else []
            return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1), *norm, nn.LeakyReLU(_SLOPE), *drop)

        self.first = conv(in_channels, channels)
        self.down = nn.ModuleList(
            nn.Sequential(conv(channels, channels, stride=2), conv(channels, channels)) for _ in range(scales - 1)
        )
        self.skips = nn.ModuleList(nn.Conv2d(channels, skip, 1) for _ in range(scales - 1 if skip else 0))
        self.up = nn.ModuleList(
            nn.Sequential(conv(channels + skip, channels), conv(channels, channels)) for _ in range(scales - 1)
        )
        self.last = nn.Conv2d(channels, out_channels, 1)
        self.positive = positive

    @property
    def blocks(self) -> dict[str, list[str]]:
        """Names of the 3 x 3 filters by block: convolutions of one resolution on the way down, and on the way up."""
        found: dict[str, list[str]] = {}
        for name, module in self.named_modules():
            if isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1):
                part, *rest = name.split(".")
                block = part if part == "first" else f"{part}.{rest[0]}"
                found.setdefault(block, []).append(f"{name}.weight")
        return found

    def forward(self, z: Tensor) -> Tensor:  # (B, in_channels, H, W) -> (B, out_channels, H, W)
        """Return the image."""
        features = [self.first(z)]
        for down in self.down:
            features.append(down(features[-1]))
        h = features.pop()
        for i in reversed(range(len(self.up))):
            fine = features[i]
            h = functional.interpolate(h, fine.shape[-2:], mode="bilinear")
            h = self.up[i](torch.cat([h, self.skips[i](fine)], dim=1) if len(self.skips) else h)
        x = self.last(h)
        return x.sigmoid() if self.positive else x
