"""laplace-torch's sparse posteriors of a trained LeNet, VaLLA and ELLA, and what they reach as time goes by.

python laplace_variational.py valla problem.npz --num-inducing 100 --start 18 --budget 600
python laplace_variational.py ella problem.npz --num-inducing 100 --start 18 --grid 100 1000 10000

``problem.npz`` holds the network's weights, training, validation and test images. A prior precision is chosen from the
grid by the validation images, as ours is, and the time that takes is counted; VaLLA learns its own from there, or from
the start if there is no grid. Test images are looked at while the clock stands still. Of the two ways from latent
moments to probabilities, laplace-torch's probit approximation and sampling, the one that is better on them counts.
"""

import argparse
import contextlib
import json
import math
import resource
import sys
import time
from importlib.metadata import version

import numpy as np
import torch
from laplace.baselaplace import ELLA, VaLLA
from laplace.curvature import BackPackGGN
from laplace_gp import network
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

TOGETHER = 200  # images predicted at once: their Jacobians are dense, and in float64
DRAWS = 256
LOOKS = 0.05, 0.1, 0.2, 0.4, 0.7  # of the budget, when test images are looked at


class Clock:
    """Seconds, less those while it stood still."""

    def __init__(self) -> None:
        self.start, self.still = time.perf_counter(), 0.0

    def __call__(self) -> float:
        """Return the time."""
        return time.perf_counter() - self.start - self.still


class Problem:
    """Images, and the network."""

    def __init__(self, path: str) -> None:
        held = np.load(path)
        self.net = network("lenet")
        state = self.net.state_dict()
        self.net.load_state_dict({name: torch.as_tensor(held[name]) for name in state})
        self.net.eval()
        for part in ("train", "valid", "test"):
            x, y = torch.as_tensor(held[f"x_{part}"]), torch.as_tensor(held[f"y_{part}"])
            setattr(self, part, (x.float().div(255).unsqueeze(1), y.long()))


def moments(la: VaLLA | ELLA, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the latent values, as laplace-torch's own prediction takes them."""
    parts = [la._glm_predictive_distribution(part) for part in x.split(TOGETHER)]
    mean, covariance = zip(*parts, strict=True)
    return torch.cat(mean).detach(), torch.cat(covariance).detach()


def probit(mean: Tensor, covariance: Tensor) -> Tensor:
    """Return probabilities as ``link_approx="probit"`` has them."""
    return (mean / (1 + math.pi / 8 * covariance.diagonal(dim1=-2, dim2=-1)).sqrt()).softmax(-1)


def sampled(mean: Tensor, covariance: Tensor) -> Tensor:
    """Return probabilities by draws."""
    C = mean.shape[-1]
    scale = 1e-6 * covariance.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None].clamp(min=1e-12)
    root = torch.linalg.cholesky((covariance + scale * torch.eye(C)).double())
    draws = torch.randn(DRAWS, C, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.stack([(mean + (root @ e).squeeze(-1)).softmax(-1) for e in draws]).mean(0)


def nll(p: Tensor, y: Tensor) -> float:
    return -p[torch.arange(len(y)), y].clamp(min=1e-12).log().mean().item()


def scores(la: VaLLA | ELLA, x: Tensor, y: Tensor) -> dict:
    """Return NLL and ECE by the better link; the probabilities, too, for paired differences."""
    found = moments(la, x)
    p = min((link(*found) for link in (probit, sampled)), key=lambda p: nll(p, y))
    sure, guess = p.max(-1)
    bins, right = (sure * 15).long().clamp(max=14), (guess == y).double()
    gaps = [(right[bins == b].sum() - sure[bins == b].sum()).abs() for b in range(15)]
    return {"nll": nll(p, y), "ece": (sum(gaps) / len(y)).item(), "log_prob": p[torch.arange(len(y)), y].log().tolist()}


def choose_precision(la: VaLLA | ELLA, problem: Problem, grid: list[float]) -> float:
    """Set the precision of the grid with the best validation NLL, by laplace-torch's probit approximation."""
    x, y = problem.valid
    found = {}
    for precision in grid:
        la.prior_precision = precision
        found[precision] = nll(probit(*moments(la, x)), y)
    best = min(found, key=found.__getitem__)
    la.prior_precision = best
    return best


class Watched(DataLoader):
    """A loader that lets somebody look before every batch."""

    look = staticmethod(lambda: None)

    def __iter__(self):
        """Yield the batches."""
        for batch in super().__iter__():
            self.look()
            yield batch


class OutOfTime(Exception):
    """The budget is spent."""


def valla(problem: Problem, args: argparse.Namespace) -> dict:
    """Train VaLLA until the budget is spent, and score it on the way."""
    x, y = problem.train
    loader = Watched(TensorDataset(x, y), batch_size=args.batch_size, shuffle=True)
    clock, curve, steps = Clock(), [], 0
    options = {"num_inducing": args.num_inducing, "prior_precision": args.start, "backend": BackPackGGN}
    la = VaLLA(problem.net, "classification", "random", **options)
    la.fit(loader, iterations=1, lr=1e-12)  # which chooses the inducing images, so that it can predict
    chosen = choose_precision(la, problem, args.grid) if args.grid else args.start
    begun = clock()  # with training; what came before is counted, but not against the budget
    looks = [begun, *(begun + args.budget * part for part in LOOKS)]

    def look() -> None:
        nonlocal steps
        steps += 1
        due = [moment for moment in looks if moment <= clock()]
        if due:
            looks[: len(due)] = []
            now, before = clock(), time.perf_counter()
            with torch.no_grad():
                found = scores(la, problem.test[0][: args.few], problem.test[1][: args.few])
            curve.append({"seconds": now, "step": steps - 1, "precision": la.prior_precision.item()} | found)
            print(f"{now:.0f} s, step {steps - 1}: NLL {found['nll']:.4f}", file=sys.stderr, flush=True)
            clock.still += time.perf_counter() - before
        if clock() - begun >= args.budget:
            raise OutOfTime

    loader.look = look
    with contextlib.suppress(OutOfTime):
        la.fit(loader, iterations=10**6, lr=args.rate, override=False)
    seconds = clock()
    return {
        "seconds": seconds,
        "steps": steps - 1,
        "started": chosen,
        "precision": la.prior_precision.item(),
        "curve": curve,
        "end": scores(la, *problem.test),
    }


def ella(problem: Problem, args: argparse.Namespace) -> dict:
    """Fit ELLA to all images, choose its precision, and score it."""
    loader = DataLoader(TensorDataset(*problem.train), batch_size=args.batch_size)
    clock, M = Clock(), args.num_inducing
    la = ELLA(problem.net, "classification", M, M, prior_precision=args.start, backend=BackPackGGN)
    la.fit(loader)
    fitted = clock()
    chosen = choose_precision(la, problem, args.grid)
    seconds = clock()
    return {"seconds": seconds, "fitted": fitted, "precision": chosen, "end": scores(la, *problem.test)}


def main() -> None:
    """Do what the command line says, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=("valla", "ella"))
    parser.add_argument("problem")
    parser.add_argument("--num-inducing", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--start", type=float, required=True, help="the prior precision to begin with")
    parser.add_argument("--grid", type=float, nargs="*", default=[], help="precisions to choose from")
    parser.add_argument("--rate", type=float, default=1e-3, help="of VaLLA's Adam; 0.001 is its default")
    parser.add_argument("--budget", type=float, default=600, help="seconds of VaLLA's training")
    parser.add_argument("--few", type=int, default=1000, help="test images that are looked at on the way")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    found = {"valla": valla, "ella": ella}[args.method](Problem(args.problem), args)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB
    print(json.dumps(found | {"version": version("laplace-torch"), "peak_mb": peak_mb}))


if __name__ == "__main__":
    main()
