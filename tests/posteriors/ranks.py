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
    options = {"num_samples": 3, "tolerance": 1e-12, "preconditioner": 5}
    found = {}
    for name, likelihood in (("memory", "categorical"), ("loader", "categorical"), ("noise", "gaussian")):
        problem = Problem("cnn", likelihood, "grouped", n=21)
        source = (problem.x, problem.y)
        if name == "loader":
            source = DataLoader(TensorDataset(*source), batch_size=4)
        post = ntkgp.fit(problem.lin, source, problem.make_likelihood(), "sampled", problem.make_prior(), **options)
        if dist.is_initialized() and dist.get_rank() == victim:
            raise SystemExit(3)
        post.tune(steps=2, tolerance=0, checkpoint=out / f"{name}.state")
        q = post.refine().latent(problem.x_new)
        found[name] = {
            "hyperparameters": torch.cat([p.detach().flatten() for p in post.parameters()]),
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
