"""The table of networks that feeds the tests, and the oracle they are held against."""

from collections.abc import Callable
from dataclasses import dataclass

import networks as zoo
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A network, an input of a few examples, and which parameters are Bayesian."""

    name: str
    net: Callable[[], nn.Module]
    x: Callable[[], object]
    parameters: object = None
    fallback: frozenset = frozenset()  # parameters known to have no rule

    def build(self, dtype=torch.float64):
        torch.manual_seed(0)
        net, x = self.net(), self.x()
        for module in net.modules():  # statistics as after training, not as at birth
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                nn.init.uniform_(module.running_var, 0.5, 2)
                nn.init.normal_(module.running_mean)
                nn.init.normal_(module.weight)
        cast = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
        return net.to(dtype).eval(), map_input(cast, x)


def map_input(fn, x):
    if isinstance(x, Tensor):
        return fn(x)
    return {k: fn(v) for k, v in x.items()} if isinstance(x, dict) else tuple(fn(v) for v in x)


def _frozen():
    net = zoo.mlp()
    net[2].weight.requires_grad_(False)
    return net


def _randn(*shape):
    return lambda: torch.randn(*shape)


def _tokens(vocabulary, *shape):
    return lambda: torch.randint(0, vocabulary, shape)


def _conv(*layers):
    return lambda: nn.Sequential(*[make() for make in layers], nn.Tanh(), nn.Flatten())


CASES = [
    Case("mlp", zoo.mlp, _randn(4, 5)),
    Case("one example", zoo.mlp, _randn(1, 5)),
    Case("lenet", zoo.lenet, _randn(3, 1, 16, 16)),
    Case("strided", _conv(lambda: nn.Conv2d(2, 3, 3, stride=(2, 1), padding=1)), _randn(3, 2, 5, 4)),
    Case("dilated", _conv(lambda: nn.Conv2d(2, 3, 2, dilation=2, padding="same")), _randn(3, 2, 4, 4)),
    Case("circular", _conv(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")), _randn(3, 2, 4, 4)),
    Case("grouped", _conv(lambda: nn.Conv2d(4, 6, 3, groups=2)), _randn(3, 4, 4, 4)),
    Case("depthwise", _conv(lambda: nn.Conv2d(3, 6, 3, groups=3), lambda: nn.Conv2d(6, 2, 1)), _randn(3, 3, 4, 4)),
    Case(
        "transposed",
        _conv(lambda: nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1)),
        _randn(3, 2, 3, 2),
    ),
    Case("transposed grouped", _conv(lambda: nn.ConvTranspose2d(4, 2, 2, groups=2, dilation=2)), _randn(3, 4, 2, 2)),
    Case("transposed, one position", _conv(lambda: nn.ConvTranspose2d(5, 2, 2)), _randn(3, 5, 1, 1)),
    Case("1-d", _conv(lambda: nn.Conv1d(2, 3, 3, stride=2), lambda: nn.Conv1d(3, 2, 2)), _randn(3, 2, 9)),
    Case("3-d", _conv(lambda: nn.Conv3d(2, 3, (1, 2, 3), padding=(0, 1, 0))), _randn(3, 2, 2, 3, 4)),
    Case("resnet20", lambda: zoo.ResNet20(width=4), _randn(3, 3, 16, 16)),
    Case("norms", zoo.Normalised, _randn(4, 6)),
    Case("unet", zoo.UNet, _randn(2, 1, 28, 28)),
    Case("transformer", zoo.Transformer, _randn(4, 4, 8)),
    Case("transformer, time first", lambda: zoo.Transformer(batch_first=False), _randn(4, 4, 8)),
    Case("cross attention", zoo.CrossAttention, lambda: (torch.randn(3, 2, 6), torch.randn(3, 5, 6))),
    Case("lstm", zoo.Recurrent, _tokens(11, 4, 6)),
    Case("gru", lambda: zoo.Recurrent(nn.GRU, layers=2), _tokens(11, 4, 6)),
    Case("tied", zoo.Tied, _tokens(9, 4, 3)),
    Case("called twice", zoo.CalledTwice, _randn(4, 5)),
    Case("functional", zoo.Functional, _randn(4, 4)),
    Case("frozen", _frozen, _randn(4, 5)),
    Case("subnetwork", zoo.mlp, _randn(4, 5), parameters=["0.bias", "4"]),
    Case("predicate", zoo.mlp, _randn(4, 5), parameters=lambda name, p: p.ndim > 1),
    Case("compiled", lambda: torch.compile(zoo.mlp(), backend="eager"), _randn(4, 5)),
    Case("keywords", zoo.ByKeywords, lambda: {"tokens": torch.randint(0, 7, (3, 2)), "numbers": torch.randn(3, 3)}),
    Case("one output", lambda: nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)), _randn(4, 2)),
    Case("vector of outputs", lambda: nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 1), nn.Flatten(0)), _randn(4, 2)),
]
BY_NAME = {case.name: case for case in CASES}


def dense_jacobian(net, x, names) -> Tensor:  # (N, C, P)
    """J by plain autograd on the user's own network, one example and one output at a time."""
    net = getattr(net, "_orig_mod", net)
    parameters = [dict(net.named_parameters())[name] for name in names]
    flags = [p.requires_grad for p in parameters]
    for p in parameters:
        p.requires_grad_(True)
    rows = []
    n = next(iter(x.values())).shape[0] if isinstance(x, dict) else (x[0] if isinstance(x, tuple) else x).shape[0]
    for i in range(n):
        part = map_input(lambda t: t[i : i + 1], x)  # noqa: B023
        f = net(**part) if isinstance(part, dict) else net(*part) if isinstance(part, tuple) else net(part)
        outputs = [
            torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True) for value in f.flatten()
        ]
        rows.append(torch.stack([torch.cat([g.flatten() for g in grads]) for grads in outputs]))
    for p, flag in zip(parameters, flags, strict=True):
        p.requires_grad_(flag)
    return torch.stack(rows)


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Largest difference, in units of the largest entry of the truth."""
    return ((found.double() - truth.double()).abs().max() / truth.abs().max()).item()
