"""Run by torchrun: time the passes of a sampled posterior over this process's share of the data.

torchrun --nproc-per-node W benchmarks/ranks.py DATA
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ntkgp

sys.path.insert(0, str(Path(__file__).parent / "reproduce"))
from images import images
from kernel import lenet

POINTS, SAMPLES, ITERATIONS = 4000, 8, 5


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = images(Path(sys.argv[1]), "fashion_mnist", "train")
    lin = ntkgp.Linearization(lenet().eval(), example=x[:2])
    prior = ntkgp.priors.Isotropic(lin, 10.0)
    options = {"num_samples": SAMPLES, "tolerance": 1e-12, "max_iterations": ITERATIONS, "preconditioner": 50}
    start = time.perf_counter()
    post = ntkgp.fit(lin, (x[:POINTS], y[:POINTS]), "categorical", "sampled", prior, memory_budget=1 << 28, **options)
    elapsed = time.perf_counter() - start
    if post.model.ranks.rank == 0:
        reduced = (SAMPLES + 1) * lin.num_params * 4
        print(json.dumps({"seconds": elapsed, "points": POINTS, "iterations": ITERATIONS, "all-reduce bytes": reduced}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
