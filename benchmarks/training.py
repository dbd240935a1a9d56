"""What training with uncertainty costs: diagonals of the GGN by resolution, and steps of variational Laplace.

    python benchmarks/training.py --peers DIR [--sizes 8,16,32,36,64,128] [--threads 2]

The network of the first part has five convolutions that preserve channels and resolution (Miani et al. 2022, Fig. 7).
Memory is what a process of its own holds at most, above what it held before; exact methods stop before 8 GB, as
extrapolated from the sizes before. The mixed diagonal is exact at 8² and approximate beyond, where its exponents begin.
The table goes to benchmarks/results/training.md, the numbers to training.json beside it.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from harness import HERE, Table, median, memory_mb, run_json, write
from torch import nn

import ntkgp
from ntkgp.curvature import LayerwiseCurvature

sys.path.insert(0, str(HERE / "reproduce"))
from softplus_networks import cnn
from variational_laplace import OBJECTIVES

BATCH, LIMIT = 4, 8192  # images; MB
BOUND = 256  # of the mixed diagonal: images of at most so many numbers, 8² x 3, are exact
METHODS = {"approximate": None, "mixed": BOUND, "exact": None}
PEERS = ("diagonal", "kfac", "kfac sampled")
STEPS, STEP_BATCH = 60, 128


def network() -> nn.Sequential:
    """Five convolutions, 3 channels in and out."""
    torch.manual_seed(0)
    layers = [part for _ in range(5) for part in (nn.Conv2d(3, 3, 3, padding=1), nn.Tanh())]
    return nn.Sequential(*layers[:-1], nn.Flatten()).eval()


# What each child process measures; every function returns something JSON can hold


def measure_curvature(method: str, size: int, repeats: int) -> dict:
    """Seconds and memory of the diagonal of the squared error's Hessian, Λ = 2 I, as BackPACK has it."""
    layers, gaussian = LayerwiseCurvature(network()), ntkgp.likelihoods.Gaussian(0.5, learn_noise=False)

    def run(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return layers.diagonal(x, lambda f: gaussian.expand(x.flatten(1), f).R, method, METHODS[method])

    run(torch.rand(1, 3, 4, 4))
    x = torch.rand(BATCH, 3, size, size, generator=torch.Generator().manual_seed(0))
    Path("/proc/self/clear_refs").write_text("5")  # the highest from here on
    before, seconds = memory_mb("VmRSS"), []
    for _ in range(repeats):
        start = time.perf_counter()
        found = run(x)
        seconds.append(time.perf_counter() - start)
    total = sum(h.sum().item() for h in found.values())
    return {"seconds": median(seconds), "mb": memory_mb("VmHWM") - before, "sum": total}


def measure_steps() -> dict:
    """Seconds of a step of each objective on the network of make reproduce-training, in turn."""
    x, y = torch.rand(STEP_BATCH, 1, 28, 28), torch.randint(10, (STEP_BATCH,))
    objectives = {name: OBJECTIVES[name](cnn(), num_data=20_000) for name in ("MAP", "VI", "VL")}
    optimizers = {name: torch.optim.Adam(o.parameter_groups(1e-3)) for name, o in objectives.items()}
    times: dict[str, list[float]] = {name: [] for name in objectives}
    for _ in range(STEPS):
        for name, objective in objectives.items():
            start = time.perf_counter()
            optimizers[name].zero_grad()
            objective.loss(x, y).backward()
            optimizers[name].step()
            times[name].append(time.perf_counter() - start)
    parameters = sum(p.numel() for p in cnn().parameters())
    return {name: median(each[2:]) for name, each in times.items()} | {"parameters": parameters}


MEASUREMENTS = {"curvature": measure_curvature, "steps": measure_steps}


def child(threads: int, name: str, *arguments: object) -> dict:
    """Run one measurement in a process of its own."""
    command = [sys.executable, __file__, "--threads", str(threads), "--measure", name, *map(str, arguments)]
    return run_json(command, f"ours: {name} {' '.join(map(str, arguments))}")


def peer(python: Path, threads: int, kind: str, size: int, repeats: int) -> dict:
    """Run BackPACK in its own environment."""
    command = [python, "-W", "ignore", HERE / "peers/backpack_curvature.py", "--kind", kind, "--size", str(size)]
    options = ["--batch", str(BATCH), "--repeats", str(repeats), "--threads", str(threads)]
    return run_json([*command, *options], f"BackPACK: {kind} {size}")


def exponent(sizes: list[int], values: list[float]) -> float:
    """Return the slope of log(value) against log(pixels), by least squares."""
    x, y = torch.tensor(sizes).double().log() * 2, torch.tensor(values).double().clamp(min=1e-9).log()
    return (((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()).item()


def curvature(peers: Path, sizes: list[int], threads: int) -> dict:
    """Measure every method at every size, unless it is sure to take more than 8 GB."""
    python = peers / "laplace/bin/python"
    found: dict[str, dict[int, dict]] = {}
    for size in sizes:
        repeats = 5 if size <= 32 else 2
        for method in METHODS:
            if fits(found.get(method, {}), size):
                found.setdefault(method, {})[size] = child(threads, "curvature", method, size, repeats)
        for kind in PEERS:
            if fits(found.get(f"BackPACK {kind}", {}), size):
                found.setdefault(f"BackPACK {kind}", {})[size] = peer(python, threads, kind, size, repeats)
    return found


def fits(known: dict[int, dict], size: int) -> bool:
    """Tell whether memory stays below 8 GB, quadratic in pixels if it has grown faster than linearly so far."""
    if not known:
        return True
    (a, first), (b, last) = (list(known.items())[i] for i in (0, -1))
    faster = b > a and math.log(last["mb"] / first["mb"]) / math.log(b / a) > 2.4
    return last["mb"] * (size / b) ** (4 if faster else 2) <= LIMIT


def tabulated(found: dict, steps: dict) -> Table:
    table = Table()
    for what, key in (("memory, MB", "mb"), ("seconds", "seconds")):
        for name, by_size in found.items():
            detail = ", ".join(f"{size}²: {m[key]:.3g}" for size, m in by_size.items())
            some = {size: m[key] for size, m in by_size.items() if name != "mixed" or 3 * size**2 > BOUND}
            slope = exponent(list(some), list(some.values())) if len(some) > 1 else math.nan
            row = f"{name}: exponent of {what} in pixels"
            if name in ("approximate", "mixed"):
                table.at_most(row, slope, 1.15, detail)
            else:
                table.note(row, f"{slope:.2f} ({detail})")
    if 36 in found["approximate"] and 36 in found["exact"]:
        ours, whole = found["approximate"][36]["mb"], found["exact"][36]["mb"]
        table.at_least("memory at 36 x 36 x 3, exact over approximate", whole / ours, 20, f"{whole:.0f}, {ours:.1f} MB")
    if "BackPACK diagonal" in found:
        both = found["exact"].keys() & found["BackPACK diagonal"].keys()
        gap = max(abs(found["exact"][s]["sum"] / found["BackPACK diagonal"][s]["sum"] - 1) for s in both)
        table.at_most("exact diagonal, its sum against BackPACK's, relative difference", gap, 1e-4, "", ".1e")
    told = f"{1e3 * steps['VL']:.0f} against {1e3 * steps['MAP']:.0f} ms, {steps['parameters']} parameters"
    table.at_most("step of variational Laplace over one of MAP", steps["VL"] / steps["MAP"], 3, told)
    table.note("step of mean-field VI over one of MAP", f"{steps['VI'] / steps['MAP']:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with the peers' environments")
    parser.add_argument("--sizes", default="8,16,32,36,64,128")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="print the table, keep nothing")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.measure:
        name, *rest = args.measure
        print(json.dumps(MEASUREMENTS[name](*(int(a) if a.isdigit() else a for a in rest))))
        return
    if args.peers is None:
        parser.error("--peers is needed")
    start = time.perf_counter()
    found = curvature(args.peers.absolute(), [int(size) for size in args.sizes.split(",")], args.threads)
    steps = child(args.threads, "steps")
    table = tabulated(found, steps)
    if args.dry:
        print(table)
        return
    title = "What training with uncertainty costs"
    write("training", "make bench-training", title, table, {"curvature": found, "steps": steps}, start)


if __name__ == "__main__":
    main()
