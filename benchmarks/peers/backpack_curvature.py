"""BackPACK's exact diagonal of the GGN and its Kronecker factors, of a convolutional network that preserves its input.

python backpack_curvature.py --kind diagonal --size 16 --batch 4 --repeats 3 --threads 2

One JSON line: seconds, memory above what the process held before, and the sum of the diagonal, to compare with.
"""

import argparse
import json
import statistics
import time
from importlib.metadata import version
from pathlib import Path

import torch
from backpack import backpack, extend
from backpack.extensions import KFAC, KFLR, DiagGGNExact
from torch import nn

KINDS = {"diagonal": DiagGGNExact, "kfac": KFLR, "kfac sampled": KFAC}


def network() -> nn.Sequential:
    """As in benchmarks/training.py."""
    torch.manual_seed(0)
    layers = [part for _ in range(5) for part in (nn.Conv2d(3, 3, 3, padding=1), nn.Tanh())]
    return extend(nn.Sequential(*layers[:-1], nn.Flatten()))


def memory_mb(key: str) -> float:
    """VmRSS now, or VmHWM, the highest since it was reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def main() -> None:
    """Warm up on a tiny image, then measure."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kind", choices=sorted(KINDS), required=True)
    options.add_argument("--size", type=int, required=True)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    net, loss = network(), extend(nn.MSELoss(reduction="sum"))

    def run(x: torch.Tensor) -> None:
        with backpack(KINDS[args.kind]()):
            loss(net(x), x.flatten(1)).backward()

    generator = torch.Generator().manual_seed(0)
    run(torch.rand(1, 3, 4, 4, generator=generator))
    x = torch.rand(args.batch, 3, args.size, args.size, generator=torch.Generator().manual_seed(0))
    Path("/proc/self/clear_refs").write_text("5")
    before, seconds = memory_mb("VmRSS"), []
    for _ in range(args.repeats):
        net.zero_grad()
        start = time.perf_counter()
        run(x)
        seconds.append(time.perf_counter() - start)
    found = {"peer": "backpack", "version": version("backpack-for-pytorch"), "seconds": statistics.median(seconds)}
    found["mb"] = memory_mb("VmHWM") - before
    if args.kind == "diagonal":
        found["sum"] = sum(p.diag_ggn_exact.sum().item() for p in net.parameters())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
