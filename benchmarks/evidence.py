"""Evidence at scale: estimators, preconditioners, tuning, and the linear model of all of FashionMNIST.

    python benchmarks/evidence.py --data DIR [--only products,ranks,solvers,tuning,full,refinement] [--threads 2]

Each section prints its rows and keeps its figures in benchmarks/results/evidence/<section>.json; the table is made of
what is there, and ``--only ""`` makes it again. Sections run one after the other, each in a process of its own.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn

import ntkgp
from ntkgp.posteriors.data import as_source, draw
from ntkgp.posteriors.descent import KRONECKER_POINTS, Objective, Run, kronecker_preconditioner
from ntkgp.posteriors.model import Chunk, LinearModel, Minibatch
from ntkgp.report import metrics
from ntkgp.solvers import Momentum, Nystrom, conjugate_gradients

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
            last = torch.stack([warm.x, *(() if last is None else last[:1])])
            gamma = (warm.x * (warm.x @ RKR / alpha)).sum(1)
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
    """Count passes over the data: chunks whose features are not kept, as the subset's are, and minibatches."""

    def __init__(self, N: int) -> None:
        self.N, self.examples = N, {"push": 0, "pull": 0, "minibatches": 0}
        self.replaced = {name: getattr(Chunk, name) for name in ("push", "pull")}
        for name, method in self.replaced.items():
            setattr(Chunk, name, self._counted(name, method))
        self.part = Objective.likelihood_part
        Objective.likelihood_part = self._counted_part

    def _counted(self, name: str, method: Callable) -> Callable:
        def call(chunk: Chunk, v: Tensor) -> Tensor:
            self.examples[name] += 0 if chunk.kept else len(chunk.data)
            return method(chunk, v)

        return call

    @property
    def _counted_part(self) -> Callable:
        def call(objective: Objective, batch: Minibatch, delta: Tensor) -> tuple[Tensor, Tensor]:
            self.examples["minibatches"] += batch.size
            return self.part(objective, batch, delta)

        return call

    def stop(self) -> float:
        """Return the number of passes: the larger of both products' counts, minibatches, and one for f."""
        for name, method in self.replaced.items():
            setattr(Chunk, name, method)
        Objective.likelihood_part = self.part
        pairs = max(self.examples["push"], self.examples["pull"])
        return 1 + (pairs + self.examples["minibatches"]) / self.N


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
    # Each of the 6,000 stands for ten: the precisions are for the model of all images.
    few = weighted(lin, x, y).tune(steps=args.em, tolerance=0.05, search=SEARCH)
    found["em"], found["em seconds"] = few.history, time.perf_counter() - start
    print("EM", found["em seconds"], few.history[-1], flush=True)
    prior, around = few.prior, few.predict(x_test)
    del few  # its features and factor take as much memory as all that follows
    counter = Passes(len(x))
    post = ntkgp.fit(
        lin, (x, y), "categorical", "sampled", prior, num_samples=8, tolerance=0.1, max_iterations=13,
        preconditioner=2000, memory_budget=1 << 30,
    )  # fmt: skip
    found["samples"] = {"iterations": post.solution.iterations, "residual": post.solution.residual}
    print("samples", time.perf_counter() - start, found["samples"], counter.examples, flush=True)
    refined = post.refine(curvature_at="map", **SEARCH)
    found["passes"], found["seconds"] = counter.stop(), time.perf_counter() - start
    found["examples"], found["certificate"] = counter.examples, vars(refined.certificate)
    found["peak"] = peak_mb()
    print("refined", found["seconds"], found["passes"], found["certificate"], found["peak"], flush=True)
    score = lambda name, prediction: found.setdefault("scores", {}).update({name: scored(prediction, y_test)})  # noqa: E731
    score("MAP", post.predict(x_test, predictive="map"))
    score("mean and samples, evidence at θ_⋆", refined.predict(x_test))
    score("mean alone", _alone(refined, x_test))
    score("samples around the network", post.predict(x_test))
    print(found["scores"], flush=True)
    del post, refined
    at_map = weighted(lin, x, y).tune(at="map", steps=args.em, tolerance=0.05)
    score("samples of 6,000 around the network, evidence at θ*", at_map.predict(x_test))
    score("the same, evidence at θ_⋆", around)
    last = ntkgp.fit(lin, (x, y), "categorical", "last_layer", memory_budget=1 << 30)
    score("last layer, tuned", last.predict(x_test))
    kron = kronecker(lin, x, y)
    score("kron of 6,000, tuned", kron.predict(x_test))
    score("the same, refined on all", kron.refine(data=(x, y), **SEARCH).predict(x_test))
    return found


FEW = 6000
SEARCH = {"solver": "descent", "epochs": 3}


def weighted(lin: ntkgp.Linearization, x: Tensor, y: Tensor) -> ntkgp.Posterior:
    """Return samples of the posterior of 6,000 images that stand for all."""
    prior = ntkgp.priors.Grouped(lin, by="layer", precision=10.0)
    weights = torch.full((FEW,), len(x) / FEW)
    options = {"num_samples": 8, "tolerance": 0.1, "preconditioner": 1500, "max_iterations": 30}
    return ntkgp.fit(lin, (x[:FEW], y[:FEW]), "categorical", "sampled", prior, weights=weights, **options)


def kronecker(lin: ntkgp.Linearization, x: Tensor, y: Tensor) -> ntkgp.Posterior:
    """Return the Kronecker-factored posterior of 6,000 images that stand for all, tuned by MacKay's steps."""
    prior = ntkgp.priors.Grouped(lin, by="layer", precision=10.0)
    weights = torch.full((FEW,), len(x) / FEW)
    post = ntkgp.fit(lin, (x[:FEW], y[:FEW]), "categorical", "kron", prior, weights=weights)
    return post.tune(method="fixed_point", steps=8, search=SEARCH)


# 5. Refinement at scale


def refinement(args: argparse.Namespace) -> dict:
    """Refine a LeNet after two epochs and a converged one, beside training them on for as many seconds."""
    x, y = images(args.data, "fashion_mnist", "train")
    x_test, y_test = images(args.data, "fashion_mnist", "test")
    found = {}
    for epochs in (2, args.converged):
        net = trained(args.data, args.cache, epochs)
        lin = ntkgp.Linearization(net, example=x[:2])
        with torch.no_grad():
            forward = seconds(lambda: [net(part) for part in x.split(256)])  # noqa: B023
        prior = ntkgp.priors.Isotropic(lin, 10.0)
        start = time.perf_counter()
        post = ntkgp.fit(lin, (x[:1000], y[:1000]), "categorical", "kron", prior, weights=torch.full((1000,), 60.0))
        fitting = time.perf_counter() - start
        rows = {"MAP": scored(post.predict(x_test, predictive="map"), y_test)}
        for passes in (1, 3):
            start = time.perf_counter()
            refined = post.refine(data=(x, y), solver="descent", epochs=passes)
            elapsed = time.perf_counter() - start
            certificate = vars(refined.certificate)
            mean = scored(_alone(refined, x_test), y_test)
            more = scored_network(continued(net, x, y, elapsed), x_test, y_test)
            rows[f"refined, {passes} epochs"] = mean | {"seconds": elapsed, "certificate": certificate}
            rows[f"trained on for {elapsed:.0f} s"] = more
            print(epochs, passes, elapsed, mean, more, certificate, flush=True)
        rows["refined, 3 epochs, with Kronecker covariance"] = scored(refined.predict(x_test), y_test)
        pairs = Counted(lin, prior, x, y)
        found[str(epochs)] = {"rows": rows, "forward": forward, "epoch": pairs.seconds(), "kron": fitting}
        print(epochs, found[str(epochs)]["epoch"] / forward, flush=True)
    return found


class Counted:
    """One epoch of descent by itself, without the passes before and after it."""

    def __init__(self, lin: ntkgp.Linearization, prior: ntkgp.priors.Prior, x: Tensor, y: Tensor) -> None:
        likelihood = ntkgp.likelihoods.Categorical()
        model = LinearModel(lin, as_source((x, y), lin, likelihood), likelihood)
        chosen, N = draw(model.source, lin, likelihood, KRONECKER_POINTS, 0)
        precondition = kronecker_preconditioner(model, prior, likelihood, None, chosen, N)
        self.run = Run(Objective(model, prior, likelihood, N), precondition, 1, 256, 0)
        self.start = torch.zeros_like(lin.theta).unsqueeze(0)

    def seconds(self) -> float:
        """Return the median of three epochs."""
        with torch.no_grad():
            return seconds(lambda: self.run._epoch(Momentum.at(self.start), 0, 1e-3))


def continued(net: nn.Module, x: Tensor, y: Tensor, budget: float, decay: float = 1e-5) -> nn.Module:
    """Train a copy of the network for so many seconds more: Adam, its rate falling to zero with the time."""
    net, start = deepcopy(net).train(), time.perf_counter()
    optimizer, generator = torch.optim.Adam(net.parameters(), 2e-3), torch.Generator().manual_seed(1)
    while True:
        for index in torch.randperm(len(x), generator=generator).split(128):
            left = 1 - (time.perf_counter() - start) / budget
            if left <= 0:
                return net.eval()
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * left
            optimizer.zero_grad()
            penalty = decay / 2 * sum(p.square().sum() for p in net.parameters())
            (nn.functional.cross_entropy(net(x[index]), y[index]) + penalty).backward()
            optimizer.step()


def scored_network(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    with torch.no_grad():
        f = torch.cat([net(part) for part in x.split(500)])
    return {
        "nll": nn.functional.cross_entropy(f, y).item(),
        "accuracy": metrics.accuracy(f.softmax(-1), y),
        "ece": metrics.expected_calibration_error(f.softmax(-1), y),
    }


def _alone(post: ntkgp.Posterior, x: Tensor) -> ntkgp.posteriors.Prediction:
    """Predict with the mean and no covariance."""
    from ntkgp.posteriors.prediction import Latent, predictive_of

    with torch.no_grad():
        f = torch.cat([post.lin(part) + post.lin.jvp(part, post.shift) for part in x.split(500)])
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


SECTIONS = {
    "products": products,
    "ranks": ranks,
    "solvers": solvers,
    "tuning": tuning,
    "full": full,
    "refinement": refinement,
}


ELSEWHERE = """
The same target makes the [comparison of five networks](../../docs/results/adapted/README.md) under the evidence at θ_⋆
and at θ*, and the [error bars of a network with BatchNorm](../../docs/results/figures/normalised.png) under either.
"""


def origins() -> str:
    """Return where each section was run."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(OUT.glob("*.json"))}
    return "\n".join(f"- {name}: commit {run['commit']}, {run['machine']}" for name, run in found.items())


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
    if s := found.get("refinement"):
        for epochs, part in s.items():
            if not epochs.isdigit():
                continue
            ratio, detail = part["epoch"] / part["forward"], f"{part['epoch']:.1f} s / {part['forward']:.1f} s"
            rows.at_most(f"LeNet of {epochs} epochs: an epoch of refinement, in forward passes", ratio, 5, detail)
            for name, row in part["rows"].items():
                shown = ", ".join(f"{row[key]:.4f}" for key in ("nll", "accuracy", "ece"))
                after = f"; {row['seconds']:.0f} s" if "seconds" in row else ""
                rows.note(f"LeNet of {epochs} epochs: test NLL, accuracy, ECE: {name}", shown + after)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path("build/evidence"))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--converged", type=int, default=12)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--em", type=int, default=8)
    parser.add_argument("--tolerance", type=float, default=1e-2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    OUT.mkdir(parents=True, exist_ok=True)
    origin = commit()  # of the code that runs, whatever is committed meanwhile
    names = [name for name in args.only.split(",") if name]
    for name in names:
        start = time.perf_counter()
        if len(names) == 1:
            found = SECTIONS[name](args) | {"commit": origin, "machine": machine()}
            (OUT / f"{name}.json").write_text(json.dumps(found, indent=1, default=float) + "\n")
        else:  # a process of its own, so that its peak of memory is its own
            subprocess.run([sys.executable, *sys.argv, "--only", name], check=True)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    text = f"# Evidence at scale\n\n`make bench-evidence`, float32, section by section:\n\n{origins()}\n\n{table()}\n"
    (HERE / "results" / "evidence.md").write_text(text + ELSEWHERE)
    print(text)


if __name__ == "__main__":
    main()
