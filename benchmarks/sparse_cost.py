"""What a step of a sparse process costs in points, inducing values and classes."""

import argparse
import time

import numpy as np
import torch
from harness import Table, median
from torch import nn

import ntkgp
from ntkgp.posteriors.sparse_steps import Steps

__all__ = ["cost", "cost_rows"]


def step_seconds(N: int, M: int, C: int, n: int = 200, repeats: int = 7) -> float:
    """Return how long a natural-gradient step of n points takes, the rows being kept."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, C))
    x, y = torch.randn(N, 20), torch.randint(C, (N,))
    lin = ntkgp.Linearization(net, example=x[:2])
    prior = ntkgp.priors.Isotropic(lin, 1.0)
    options = {"num_inducing": M, "inducing": "random", "objective": "nystrom", "batch_size": n, "progress": False}
    post = ntkgp.fit(lin, (x, y), "categorical", "variational", prior, nugget=1e-3, **options)
    q, plan = post._q(), post.plan()
    steps = Steps(post, post.process.feed(False), False)
    times = []
    for seed in range(repeats):
        for batch in list(steps.feed.minibatches(n, seed))[:3]:
            start = time.perf_counter()
            measure = steps.on(batch)
            found = measure.under(q, plan.averages, seed)
            torch.linalg.cholesky(measure.natural_step(q, found, 0.1, plan.averages, seed).P)
            times.append(time.perf_counter() - start)
    return median(times)


def step_flops(M: int, C: int, n: int = 200) -> float:
    """Return the multiplications and additions of a step.

    Whitening rows and spreading them by S are triangular solves, n C M² each; Wᵀ Λ W takes 2 n C M² and each of the two
    products by point 2 n C² M; two Cholesky factors and the divergence's inverse M³/3, M³/3 and 2 M³/3.
    """
    return 4 * n * C * M**2 + 4 * n * C**2 * M + 4 / 3 * M**3


def exponent(sizes: list[int], values: list[float]) -> float:
    """Return the slope of logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def cost(args: argparse.Namespace) -> dict:
    """Time steps against N, M and C."""
    Ns, Ms, Cs = [2_000, 8_000, 32_000], [256, 512, 1024, 2048], [5, 10, 20, 40]
    found = {
        "N": {"sizes": Ns, "seconds": [step_seconds(N, 256, 10) for N in Ns]},
        "M": {"sizes": Ms, "seconds": [step_seconds(4_000, m, 10) for m in Ms]},
        "C": {"sizes": Cs, "seconds": [step_seconds(4_000, 512, C) for C in Cs]},
    }
    counted = {"M": [step_flops(m, 10) for m in Ms], "C": [step_flops(512, C) for C in Cs]}
    for name, sizes in (("N", Ns), ("M", Ms), ("C", Cs)):
        found[name]["exponent"] = exponent(sizes, found[name]["seconds"])
        found[name]["counted"] = exponent(sizes, counted[name]) if name in counted else 0.0
    print(found, flush=True)
    return found


def cost_rows(found: dict, table: Table) -> None:
    for name, run in found.items():
        if name in ("N", "M", "C"):
            told = ", ".join(
                f"{1e3 * s:.0f} ms at {size}" for size, s in zip(run["sizes"], run["seconds"], strict=True)
            )
            bar = run["counted"] + (0.1 if name == "N" else 0.25)
            table.at_most(
                f"a step against {name}: exponent", run["exponent"], bar, f"counted {run['counted']:.2f}; {told}"
            )
