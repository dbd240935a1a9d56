"""Run by torchrun: fit, tune and refine a sampled posterior, and write what came out."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
from problems import Problem
from torch.utils.data import DataLoader, TensorDataset

import ntkgp


def main(out: Path, victim: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    problem = Problem("cnn", "categorical", "grouped", n=21)
    options = {"num_samples": 3, "tolerance": 1e-8, "preconditioner": 5}
    data = {
        "memory": (problem.x, problem.y),
        "loader": DataLoader(TensorDataset(problem.x, problem.y), batch_size=4),
    }
    found = {}
    for name, source in data.items():
        post = ntkgp.fit(problem.lin, source, problem.make_likelihood(), "sampled", problem.make_prior(), **options)
        if dist.is_initialized() and dist.get_rank() == victim:
            raise SystemExit(3)
        post.tune(steps=2, tolerance=0, checkpoint=out / f"{name}.state")
        q = post.refine().latent(problem.x_new)
        found[name] = {
            "precision": post.prior.precision.detach(),
            "mean": q.mean,
            "covariance": q.covariance_matrix,
            "log_det": post.log_det().value,
        }
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(found, out / "found.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
