"""Networks of every kind the library must linearise, small enough for a dense Jacobian in float64."""

import torch
import torch.nn.functional as F
from torch import nn


def mlp(d_in=5, d_out=3, width=7):
    return nn.Sequential(
        nn.Linear(d_in, width), nn.Tanh(), nn.Linear(width, width - 1), nn.ReLU(), nn.Linear(width - 1, d_out)
    )


def lenet(channels=(3, 4), classes=4):
    return nn.Sequential(
        nn.Conv2d(1, channels[0], 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels[0], channels[1], 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(channels[1] * 4, 6),
        nn.ReLU(),
        nn.Linear(6, classes),
    )


class ResidualBlock(nn.Module):
    """Two convolutions and a parameter-free shortcut: strided, with new channels padded by zeros."""

    def __init__(self, d_in, d_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(d_in, d_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(d_out)
        self.conv2 = nn.Conv2d(d_out, d_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(d_out)
        self.stride, self.extra = stride, d_out - d_in

    def forward(self, x):
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        short = x[:, :, :: self.stride, :: self.stride]
        return F.relu(h + F.pad(short, (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2)))


class ResNet20(nn.Module):
    """The CIFAR ResNet with 3 x 3 blocks; ``width`` 16 is the usual one."""

    def __init__(self, width=16, classes=10):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        sizes = [(width, 1), (width, 1), (width, 1), (2 * width, 2), (2 * width, 1), (2 * width, 1)]
        sizes += [(4 * width, 2), (4 * width, 1), (4 * width, 1)]
        blocks, d = [], width
        for d_out, stride in sizes:
            blocks.append(ResidualBlock(d, d_out, stride))
            d = d_out
        self.blocks = nn.Sequential(*blocks)
        self.linear = nn.Linear(d, classes)

    def forward(self, x):
        return self.linear(self.blocks(F.relu(self.bn1(self.conv1(x)))).mean((2, 3)))


class UNet(nn.Module):
    """Two scales with a skip connection; the output is an image."""

    def __init__(self, width=3):
        super().__init__()
        self.down1 = nn.Conv2d(1, width, 3, padding=1)
        self.down2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.out = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x):
        a = F.leaky_relu(self.down1(x), 0.2)
        b = F.leaky_relu(self.norm(self.down2(a)), 0.2)
        return torch.sigmoid(self.out(torch.cat([a, self.up(b)], 1)))


class Transformer(nn.Module):
    """Encoder with a class token and learnt positions; attention by ``nn.MultiheadAttention``."""

    def __init__(self, d=8, length=4, batch_first=True):
        super().__init__()
        layer = nn.TransformerEncoderLayer(d, 2, 12, batch_first=batch_first, activation="gelu", norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.positions = nn.Parameter(0.3 * torch.randn(length + 1, d))
        self.token = nn.Parameter(torch.randn(1, 1, d))
        self.head, self.batch_first = nn.Linear(d, 3), batch_first

    def forward(self, x):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions[: x.shape[1] + 1]
        if self.batch_first:
            return self.head(self.encoder(x)[:, 0])
        return self.head(self.encoder(x.transpose(0, 1))[0])


class CrossAttention(nn.Module):
    """Fused attention between two inputs."""

    def __init__(self, d=6):
        super().__init__()
        self.q, self.kv, self.head = nn.Linear(d, d), nn.Linear(d, 2 * d, bias=False), nn.Linear(d, 2)

    def forward(self, x, context):
        k, v = self.kv(context).chunk(2, -1)
        split = lambda t: t.unflatten(-1, (2, -1)).transpose(1, 2)  # noqa: E731
        h = F.scaled_dot_product_attention(split(self.q(x)), split(k), split(v))
        return self.head(h.transpose(1, 2).flatten(2).mean(1))


class Recurrent(nn.Module):
    """Embedding and a recurrent classifier on the last state."""

    def __init__(self, cell=nn.LSTM, layers=1):
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=0)
        self.cell = cell(6, 5, batch_first=True, num_layers=layers)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens):
        return self.head(self.cell(self.embedding(tokens))[0][:, -1])


class Tied(nn.Module):
    """A language model whose output weights are its embedding."""

    def __init__(self, d=5, vocabulary=9):
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(vocabulary, d), nn.Linear(d, d)
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.hidden(self.embedding(tokens).mean(1))))


class CalledTwice(nn.Module):
    """One layer applied twice."""

    def __init__(self, d=5):
        super().__init__()
        self.inner, self.outer = nn.Linear(d, d), nn.Linear(d, 2)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


class Functional(nn.Module):
    """Parameters used by functions and operators only, and one that is not used at all."""

    def __init__(self, d=4):
        super().__init__()
        self.w = nn.Parameter(torch.randn(d, d))
        self.v = nn.Parameter(torch.randn(d, 3))
        self.stack = nn.Parameter(torch.randn(3, 3))
        self.scale, self.shift = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.randn(3))
        self.frequency = nn.Parameter(torch.tensor([0.7]))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x):
        h = torch.tanh(F.linear(x, self.w) @ self.v)
        h = torch.einsum("nd,kd->nk", h, self.stack) * self.scale - self.shift / (2 + self.scale**2)
        return torch.sin(self.frequency * h) + h / self.shift.exp()


class Normalised(nn.Module):
    """Layer, group and root-mean-square norms, PReLU, and a weight norm."""

    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
        self.layer, self.group, self.rms = nn.LayerNorm(8), nn.GroupNorm(2, 4), nn.RMSNorm(2)
        self.prelu, self.last = nn.PReLU(), nn.Linear(8, 3)

    def forward(self, x):
        h = self.prelu(self.layer(self.first(x))).unflatten(1, (4, 2))
        return self.last(self.rms(torch.tanh(self.group(h))).flatten(1))


class ByKeywords(nn.Module):
    """A network that takes named inputs, as language models do."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dense, self.head = nn.Embedding(7, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, tokens, numbers):
        return self.head(torch.tanh(self.embedding(tokens).mean(1) + self.dense(numbers)))
