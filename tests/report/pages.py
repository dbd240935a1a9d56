"""Reports to look at: digits of scikit-learn, and a curve with a gap."""

import time
import warnings

import torch
from sklearn.datasets import load_digits
from torch import nn

import ntkgp
from ntkgp.report import Report, report


def trained(net, x, loss, steps, rate=1e-2):
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net(x)).backward()
        optimizer.step()
    return net


QUICK = {"steps": 60, "size": 40, "tested": 100}


def digits(steps=600, size=150, tested=1497) -> Report:
    """An overconfident network on 150 digits, its precisions chosen on 150 others; outside: digits through noise."""
    torch.manual_seed(0)
    found = load_digits()
    X, y = torch.as_tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16, torch.as_tensor(found.target)
    train, validation, test, _ = torch.randperm(len(X)).split([size, size, tested, len(X) - 2 * size - tested])
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 6, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 10)
    )
    net = trained(net, X[train], lambda f: nn.functional.cross_entropy(f, y[train]), steps)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the mode of the linear model gains")  # the network is not at its mode
        post = ntkgp.fit(net, (X[train], y[train]), prior="layerwise")
    post.tune(validation=(X[validation], y[validation]))
    seconds = time.perf_counter() - start
    ood = X[test][: 2 * size] * torch.rand(2 * size, 1, 8, 8)
    return report(post, (X[test], y[test]), ood, title="Digits: a small network with error bars", seconds=seconds)


def curve(steps=300) -> Report:
    """A network on a curve with a gap in between."""
    torch.manual_seed(0)
    draw = lambda n: (torch.rand(n, 1) * 6 - 3, torch.randn(n, 1))  # noqa: E731
    (x, noise), (x_test, noise_test) = draw(80), draw(60)
    x = x[(x[:, 0] < 0) | (x[:, 0] > 1.2)]
    target = lambda x, noise: torch.sin(2 * x) + 0.2 * noise[: len(x)]  # noqa: E731
    y = target(x, noise)
    net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    net = trained(net, x, lambda f: (f - y).square().mean(), steps)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the mode of the linear model gains")
        post = ntkgp.fit(net, (x, y), "gaussian")
    return report(post.refine(), (x_test, target(x_test, noise_test)))
