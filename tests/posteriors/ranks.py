"""Run by torchrun: fit, tune and refine a sampled posterior, and write what came out."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
from problems import Problem
from torch.utils.data import DataLoader, TensorDataset

import ntkgp
from ntkgp.posteriors import em

OPTIONS = {"num_samples": 3, "tolerance": 1e-12, "preconditioner": 5}
RUNS = (("memory", "categorical"), ("loader", "categorical"), ("noise", "gaussian"))


def sampled(name, likelihood, out):
    problem = Problem("cnn", likelihood, "grouped", n=21)
    source = (problem.x, problem.y)
    if name == "loader":
        source = DataLoader(TensorDataset(*source), batch_size=4)
    post = ntkgp.fit(problem.lin, source, problem.make_likelihood(), "sampled", problem.make_prior(), **OPTIONS)
    post.tune(steps=3, tolerance=0, checkpoint=out / f"{name}.state")
    q = post.refine().latent(problem.x_new)
    return {
        "hyperparameters": torch.cat([p.detach().flatten() for p in post.parameters()]),
        "mean": q.mean,
        "covariance": q.covariance_matrix,
        "log_det": post.log_det().value,
        "descent": post.search(solver="descent", epochs=3, batch_size=5).delta,
    }


def tiled():
    """A posterior whose Gram matrix is shared, kept in one piece and in several."""
    problem = Problem("cnn", "categorical", "grouped", n=21)
    found = {}
    for budget in (1 << 30, 1):
        post = problem.fit("function", memory_budget=budget).tune(steps=3)
        q = post.latent(problem.x_new)
        found |= {f"mean {budget}": q.mean, f"covariance {budget}": q.covariance_matrix}
        found[f"log evidence {budget}"] = post.log_evidence().detach()
    return found


def die_at_the_second_step(rank):
    step, calls = em._step, []

    def dying(*args):
        calls.append(1)
        if len(calls) == 2 and dist.is_initialized() and dist.get_rank() == rank:
            raise SystemExit(3)
        return step(*args)

    em._step = dying


def main(out: Path, victim: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    if victim >= 0:
        die_at_the_second_step(victim)
    found = {name: sampled(name, likelihood, out) for name, likelihood in RUNS} | {"tiles": tiled()}
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(found, out / "found.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
