"""Two processes, one posterior: the same script under torchrun shares data, results do not change.

`method="sampled"` draws from the exact posterior by conjugate gradients over the data; each process passes over its
half and they add up. Run it alone and with two processes: the numbers are the same.

    python examples/two_processes.py
    torchrun --standalone --nproc-per-node 2 examples/two_processes.py
"""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from workbench import arguments, mlp, train

import ntkgp


def main() -> None:
    args = arguments(__doc__)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)  # every process makes the same data and the same network
    n = 200 if args.small else 4000
    x = torch.randn(n, 20).double()
    y = (x[:, :3] + 0.5 * torch.randn(n, 3).double()).argmax(1)
    net = train(mlp(20, 50, 3).double(), x, y, cross_entropy, steps=30 if args.small else 300, batch=100)

    lin = ntkgp.Linearization(net, example=x)
    start = time.perf_counter()
    prior = ntkgp.priors.Isotropic(lin, 1.0)
    post = ntkgp.fit(lin, (x, y), "categorical", "sampled", prior, num_samples=4, tolerance=1e-9, memory_budget=1 << 20)
    q = post.latent(torch.randn(5, 20).double())
    seconds = time.perf_counter() - start
    if not dist.is_initialized() or dist.get_rank() == 0:
        world = dist.get_world_size() if dist.is_initialized() else 1
        print(f"processes: {world}, {seconds:.1f} s")
        print(f"variances: {q.variance.mean():.9f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
