"""Evidence at scale: estimators, preconditioners, tuning, and the linear model of all of FashionMNIST.

    python benchmarks/evidence.py --data DIR [--only products,ranks,solvers,tuning,full] [--threads 2]

Each section prints its rows and keeps its figures in benchmarks/results/evidence/<section>.json; the table is made of
what is there. Everything runs in one process, one section after the other.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import ntkgp
from ntkgp.posteriors.model import Chunk
from ntkgp.report import metrics
from ntkgp.solvers import Nystrom, conjugate_gradients

sys.path.insert(0, str(Path(__file__).parent / "reproduce"))
from harness import HERE, Table, commit, machine, median, peak_mb, run_json
from images import images
from kernel import lenet

OUT = HERE / "results" / "evidence"
CLASSES = 10


def trained(data: Path, cache: Path, epochs: int, decay: float = 1e-5) -> nn.Module:
    """Return the LeNet after so many epochs of Adam on all 60,000 images, cosine schedule."""
    path = cache / f"lenet-{epochs}.pt"
    torch.manual_seed(0)
    net = lenet()
    if path.exists():
        net.load_state_dict(torch.load(path, weights_only=True))
        return net.eval()
    x, y = images(data, "fashion_mnist", "train")
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * math.ceil(len(x) / 128))
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(128):
            optimizer.zero_grad()
            penalty = decay / 2 * sum(p.square().sum() for p in net.parameters())
            (nn.functional.cross_entropy(net(x[index]), y[index]) + penalty).backward()
            optimizer.step()
            schedule.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(net.state_dict(), path)
    return net.eval()


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def scored(prediction: ntkgp.posteriors.Prediction, y: Tensor) -> dict[str, float]:
    """Return NLL, accuracy and ECE."""
    return {
        "nll": -prediction.log_prob(y).mean().item(),
        "accuracy": metrics.accuracy(prediction.probs, y),
        "ece": metrics.expected_calibration_error(prediction.probs, y),
    }


# 1. Estimators and preconditioners


def solvers(args: argparse.Namespace) -> dict:
    """Count products: warm pathwise against cold Hutchinson; Nyström against none."""
    x, y = images(args.data, "fashion_mnist", "train")
    lin = ntkgp.Linearization(trained(args.data, args.cache, 2), example=x[:2])
    prior = ntkgp.priors.Isotropic(lin, 10.0)
    post = ntkgp.fit(lin, (x[:300], y[:300]), "categorical", "function", prior)
    L, R = post._factor()
    K = lin_gram(post)
    RKR = R.mT @ (R.mT @ K).mT * 10.0  # at precision one
    n, generator = len(L), torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(16, n, generator=generator)  # noqa: E731
    Q, e = torch.linalg.eigh(RKR.double())[::-1]
    root = (Q * e.clamp(min=0).sqrt()).float()
    epsilon, prior_noise = draw(), draw() @ root.mT

    def count(move: Callable[[float, float, float], float], steps: int) -> dict:
        """Follow a rule (α, γ, ‖θ_⋆‖²) -> α; count the products of both estimators at each point."""
        products, alpha, last, path = {"pathwise, warm": 0, "Hutchinson, cold": 0}, 1.0, None, []
        for _ in range(steps):
            post.prior.precision = alpha
            B = lambda v: v + v @ RKR / alpha  # noqa: B023, E731
            w = epsilon + prior_noise / alpha**0.5
            warm = conjugate_gradients(B, w, lambda v: v, args.tolerance, 1000, last)
            cold = conjugate_gradients(B, draw().sign(), lambda v: v, args.tolerance, 1000)
            products["pathwise, warm"] += warm.products
            products["Hutchinson, cold"] += cold.products
            last = warm.x
            gamma = (last * (last @ RKR / alpha)).sum(1)
            path.append({"alpha": alpha, "gamma": gamma.mean().item(), "error": (gamma.std() / 4).item()})
            mode = post.linear_mode().delta + lin.theta
            alpha = move(alpha, gamma.mean().item(), mode.square().sum().item())
        return products | {"path": path}

    paths = {
        "EM, 10 steps": count(lambda alpha, gamma, squares: gamma / squares, 10),
        "gradient ascent, 30 steps": count(
            lambda alpha, gamma, squares: alpha * math.exp(0.2 * math.tanh((gamma - alpha * squares) / gamma)), 30
        ),
    }
    noise = 1e-4 * K.diagonal().mean().item()
    b = draw_like(K, 4)
    shifted = lambda v: v @ K + noise * v  # noqa: E731
    plain = conjugate_gradients(shifted, b, lambda v: v, 1e-2, 5000)
    sketch = Nystrom.sketch(lambda v: v @ K, K, len(K), len(K) // 4, torch.Generator().manual_seed(1))
    helped = conjugate_gradients(shifted, b, sketch.preconditioner(noise), 1e-2, 5000)
    return {
        "paths": paths,
        "plain": plain.iterations,
        "nystrom": helped.iterations,
        "residuals": [residual(K, noise, b, s.x) for s in (plain, helped)],
        "rank": len(K) // 4,
        "rows": len(K),
        "noise": noise,
    }


def lin_gram(post: ntkgp.Posterior) -> Tensor:
    with torch.no_grad():
        return post._gram()


def draw_like(K: Tensor, rows: int) -> Tensor:
    return torch.randn(rows, len(K), generator=torch.Generator().manual_seed(2), dtype=K.dtype)


def residual(K: Tensor, noise: float, b: Tensor, x: Tensor) -> float:
    """Return the largest ‖b − (K + σ² I) x‖ / ‖b‖, recomputed in double precision."""
    left = b.double() - x.double() @ K.double() - noise * x.double()
    return (left.norm(dim=1) / b.double().norm(dim=1)).max().item()


# 2. Tuning


def tuning(args: argparse.Namespace) -> dict:
    """Time a step over eight group precisions, and a bare Cholesky factorisation with inverse."""
    x, y = images(args.data, "fashion_mnist", "train")
    lin = ntkgp.Linearization(trained(args.data, args.cache, 2), example=x[:2])
    names = lin.layout.names
    groups = {name: [name] for name in (*names[:4], *names[8:])} | {"first": names[4:6], "second": names[6:8]}
    prior = ntkgp.priors.Grouped(lin, groups, precision=10.0)
    M = args.points
    post = ntkgp.fit(lin, (x[:M], y[:M]), "categorical", "function", prior)

    def step(factor: float) -> None:
        post.prior.precision = post.prior.precision.detach() * factor
        value = post.log_evidence(at="map")
        torch.autograd.grad(value, list(post.prior.parameters()))

    start = time.perf_counter()
    step(1.0)  # the Gram matrix of each group
    first = time.perf_counter() - start
    refuse = ntkgp.Linearization.features, ntkgp.Linearization.jvp, ntkgp.Linearization.vjp
    ntkgp.Linearization.features = ntkgp.Linearization.jvp = ntkgp.Linearization.vjp = _refused
    ours = seconds(lambda: step(1.01), 5)
    ntkgp.Linearization.features, ntkgp.Linearization.jvp, ntkgp.Linearization.vjp = refuse
    n = len(post._factor()[0])
    A = torch.randn(n, n // 2)
    A = A @ A.mT
    A.diagonal().add_(n)
    bare = seconds(lambda: torch.cholesky_inverse(torch.linalg.cholesky(A)), 5)
    return {
        "groups": len(groups),
        "points": M,
        "rows": n,
        "first": first,
        "step": ours,
        "bare": bare,
        "peak": peak_mb(),
    }


def _refused(*args: object, **kwargs: object) -> None:
    raise AssertionError("the network was differentiated again")


# 3. All of FashionMNIST


class Passes:
    """Count passes over the data: J v, Jᵀu and f of chunks whose features are not kept, as the subset's are."""

    def __init__(self, N: int) -> None:
        self.N, self.examples = N, {"push": 0, "pull": 0}
        self.replaced = {name: getattr(Chunk, name) for name in self.examples}
        for name, method in self.replaced.items():
            setattr(Chunk, name, self._counted(name, method))

    def _counted(self, name: str, method: Callable) -> Callable:
        def call(chunk: Chunk, v: Tensor) -> Tensor:
            self.examples[name] += 0 if chunk.kept else len(chunk.data)
            return method(chunk, v)

        return call

    def stop(self) -> float:
        """Return the number of passes: the larger of both counts, and one for f."""
        for name, method in self.replaced.items():
            setattr(Chunk, name, method)
        return 1 + max(self.examples.values()) / self.N


def full(args: argparse.Namespace) -> dict:
    """Group precisions by EM on 6,000 images, then mean and 8 samples on all."""
    x, y = images(args.data, "fashion_mnist", "train")
    x_test, y_test = images(args.data, "fashion_mnist", "test")
    net = trained(args.data, args.cache, args.epochs)
    lin = ntkgp.Linearization(net, example=x[:2])
    found: dict = {
        "epochs": args.epochs,
        "parameters": lin.num_params,
        "rows": len(x) * CLASSES,
        "threads": args.threads,
    }
    start = time.perf_counter()
    prior = ntkgp.priors.Grouped(lin, by="layer", precision=10.0)
    few = ntkgp.fit(
        lin,
        (x[:6000], y[:6000]),
        "categorical",
        "sampled",
        prior,
        num_samples=8,
        tolerance=0.05,
    )
    few.tune(steps=args.em, tolerance=0.05)
    found["em"] = few.history
    found["em seconds"] = time.perf_counter() - start
    print("EM", found["em seconds"], few.history[-1], flush=True)
    counter = Passes(len(x))
    post = ntkgp.fit(
        lin,
        (x, y),
        "categorical",
        "sampled",
        few.prior,
        num_samples=8,
        tolerance=0.1,
        max_iterations=12,
        preconditioner=1000,
        memory_budget=2 << 30,
    )
    found["samples"] = {"iterations": post.solution.iterations, "residual": post.solution.residual}
    print("samples", time.perf_counter() - start, found["samples"], counter.examples, flush=True)
    refined = post.refine(curvature_at="map")
    found["passes"], found["seconds"] = counter.stop(), time.perf_counter() - start
    found["examples"], found["certificate"] = counter.examples, vars(refined.certificate)
    found["peak"] = peak_mb()
    print("refined", found["seconds"], found["passes"], found["certificate"], found["peak"], flush=True)
    found["scores"] = {"MAP": scored(post.predict(x_test, predictive="map"), y_test)}
    found["scores"]["samples around the network"] = scored(post.predict(x_test), y_test)
    found["scores"]["samples around the mode"] = scored(refined.predict(x_test), y_test)
    found["scores"]["mode alone"] = scored(_alone(refined, x_test), y_test)
    print(found["scores"], flush=True)
    at_map = ntkgp.fit(
        lin,
        (x[:6000], y[:6000]),
        "categorical",
        "sampled",
        ntkgp.priors.Grouped(lin, by="layer", precision=10.0),
        num_samples=8,
        tolerance=0.05,
    ).tune(at="map", steps=args.em, tolerance=0.05)
    found["scores"]["evidence at θ*, 6,000 images"] = scored(at_map.predict(x_test), y_test)
    found["scores"]["evidence at θ_⋆, 6,000 images"] = scored(few.predict(x_test), y_test)
    last = ntkgp.fit(lin, (x, y), "categorical", "last_layer", memory_budget=2 << 30)
    found["scores"]["last layer, tuned"] = scored(last.predict(x_test), y_test)
    kron = ntkgp.fit(lin, (x[:6000], y[:6000]), "categorical", "kron", ntkgp.priors.Grouped(lin, by="layer"), tune=True)
    found["scores"]["kron of 6,000, tuned"] = scored(kron.predict(x_test), y_test)
    return found


def _alone(post: ntkgp.Posterior, x: Tensor) -> ntkgp.posteriors.Prediction:
    """Predict with the mean and no covariance."""
    from ntkgp.posteriors.prediction import Latent, predictive_of

    f = post.latent(x).mean
    return predictive_of(post.likelihood, [Latent(samples=f.unsqueeze(0))], None, 1, torch.Generator().manual_seed(0))


# Products and processes


def products(args: argparse.Namespace) -> dict:
    """Time J v and Jᵀu of eight vectors, through the network and through its features, in forward passes."""
    x, _ = images(args.data, "fashion_mnist", "train")
    x = x[:2000]
    net = trained(args.data, args.cache, 2)
    lin = ntkgp.Linearization(net, example=x[:2])
    v, u = torch.randn(8, lin.num_params), torch.randn(8, len(x), CLASSES)
    with torch.no_grad():
        forward = seconds(lambda: [net(part) for part in x.split(500)], 5)
        F = lin.features(x)
        parts = lin.layout.split(v)
        flat = {name: part.flatten(1) for name, part in parts.items()}
        return {
            "forward": forward,
            "network": seconds(lambda: (lin.jvp(x, v), lin.vjp(x, u))) / 8 / forward,
            "features": seconds(lambda: (F.jvp(flat), F.vjp(u))) / 8 / forward,
            "making features": seconds(lambda: lin.features(x)) / forward,
        }


def ranks(args: argparse.Namespace) -> dict:
    """Time one and two processes with one thread each."""
    found = {}
    for world in (1, 2, 1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        run = run_json([*command, HERE / "ranks.py", args.data], f"{world} processes")
        found.setdefault(str(world), []).append(run)
    return found


SECTIONS = {"products": products, "ranks": ranks, "solvers": solvers, "tuning": tuning, "full": full}


def table() -> Table:
    """Return the rows of all sections that have figures."""
    rows = Table()
    found = {path.stem: json.loads(path.read_text()) for path in sorted(OUT.glob("*.json"))}
    if s := found.get("solvers"):
        for name, path in s["paths"].items():
            warm, cold = path["pathwise, warm"], path["Hutchinson, cold"]
            rows.at_least(
                f"warm pathwise against cold Hutchinson, products, {name}", cold / warm, 3, f"{cold} / {warm}"
            )
        rows.at_least(
            f"Nyström of rank {s['rank']} against none, iterations on K + σ² I, {s['rows']} rows",
            s["plain"] / s["nystrom"],
            5,
            f"{s['plain']} / {s['nystrom']}",
        )
    if s := found.get("tuning"):
        rows.at_most(
            f"a step over {s['groups']} precisions, M = {s['points']}, beside Cholesky and inverse",
            s["step"] / s["bare"],
            1.5,
            f"{s['step']:.1f} s / {s['bare']:.1f} s",
        )
    if s := found.get("products"):
        rows.at_most("J v and Jᵀu of 8 vectors, forward passes a vector: network", s["network"], 4, "")
        rows.note("the same from features; making features", f"{s['features']:.3f}; {s['making features']:.1f}")
    if s := found.get("ranks"):
        one, two = (min(run["seconds"] for run in s[world]) for world in "12")
        rows.note("one process, two processes, one thread each", f"{one:.1f} s, {two:.1f} s: {one / two:.2f}x")
    if s := found.get("full"):
        rows.at_most("passes over all of FashionMNIST", s["passes"], 20, "", ".1f")
        rows.at_most("minutes, EM included", s["seconds"] / 60, 60, f"{s['threads']} threads", ".0f")
        rows.at_most("peak memory, GB", s["peak"] / 1e3, 8, "", ".1f")
        for name, scores in s["scores"].items():
            rows.note(f"test NLL, accuracy, ECE: {name}", ", ".join(f"{v:.4f}" for v in scores.values()))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path("build/evidence"))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--em", type=int, default=8)
    parser.add_argument("--tolerance", type=float, default=1e-2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    OUT.mkdir(parents=True, exist_ok=True)
    for name in args.only.split(","):
        start = time.perf_counter()
        found = SECTIONS[name](args) | {"commit": commit(), "machine": machine()}
        (OUT / f"{name}.json").write_text(json.dumps(found, indent=1, default=float) + "\n")
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    text = f"# Evidence at scale\n\n`make bench-evidence`, {machine()}, float32.\n\n{table()}\n"
    (HERE / "results" / "evidence.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
