"""Sparse variational processes: beside VaLLA and ELLA on FashionMNIST, on a pretrained ResNet-20, and what steps cost.

    python benchmarks/variational.py --data DIR --peers DIR [--only fashion,cifar,cost] [--threads 2]

Each section keeps its figures in benchmarks/results/variational/<section>.json; the table is made of what is there, and
``--only ""`` makes it again. Sections run one after the other, each in a process of its own.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn

import ntkgp
from ntkgp.posteriors.sparse_steps import Steps
from ntkgp.report import metrics

sys.path.insert(0, str(Path(__file__).parent / "reproduce"))
from harness import HERE, Table, alone, commit, kept, machine, median, peak_mb, run_json
from images import DECAYS, EPOCHS, Networks, images, nll, probabilities
from kernel import lenet, zoo

mpl.use("Agg")
OUT = HERE / "results" / "variational"
M, BATCH = 100, 100  # inducing values and points in a minibatch, ours and theirs
GRID = [100.0, 300.0, 1000.0, 3000.0, 10000.0]  # precisions, ours and theirs
PEERS = {"VaLLA": ["valla"], "VaLLA, validated": ["valla", "grid"], "ELLA": ["ella", "grid"]}
VALIDATED, FEW = 1000, 1000  # validation images, and test images that all are watched on
FIRST = 100, VALIDATED  # weighted images of first fits, and as many validation images to choose the precision with
CIFAR_VALIDATED, CIFAR_GRID = 500, torch.logspace(-1, 4.5, 56)  # images whose features a GP can keep; precisions
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


# 3. All of FashionMNIST, beside VaLLA and ELLA


class Fashion:
    """The images, and the LeNet whose weight decay has the best validation NLL."""

    def __init__(self, data: Path, cache: Path) -> None:
        self.train, self.test = (images(data, "fashion_mnist", part) for part in ("train", "test"))
        self.outside = images(data, "mnist", "test")[0]
        x, y = self.train
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        seen, kept = order[5000:], order[:5000]
        networks = Networks(cache / "fashion_mnist", x[seen], y[seen], EPOCHS["fashion_mnist"])
        nets = {decay: networks.get(f"map-{decay:g}", lenet, decay, seed=0) for decay in DECAYS}
        self.validation = {decay: nll(probabilities(net, x[kept]), y[kept]) for decay, net in nets.items()}
        self.decay = min(self.validation, key=self.validation.__getitem__)
        self.net, self.valid = nets[self.decay], (x[kept[:VALIDATED]], y[kept[:VALIDATED]])

    @property
    def start(self) -> float:
        """What the weight decay means as a prior precision."""
        return self.decay * len(self.train[0])

    def save(self, path: Path) -> None:
        """Write what the peers need."""
        held = {name: weights.numpy() for name, weights in self.net.state_dict().items()}
        for part in ("train", "valid", "test"):
            x, y = getattr(self, part)
            held |= {f"x_{part}": x.squeeze(1).mul(255).round().byte().numpy(), f"y_{part}": y.numpy()}
        np.savez(path, **held)


def scored(p: Tensor, y: Tensor) -> dict:
    """Return NLL, ECE, accuracy, and log probabilities for paired differences."""
    log_prob = p[torch.arange(len(y)), y].clamp(min=1e-12).log()
    ece = metrics.expected_calibration_error(p, y)
    return {"nll": nll(p, y), "ece": ece, "accuracy": metrics.accuracy(p, y), "log_prob": log_prob.tolist()}


def ours(data: Path, cache: Path, threads: int) -> dict:
    """Fit a few weighted images, choose the precision by validation, fit all: without training, and by the ELBO."""
    torch.set_num_threads(threads)
    problem = Fashion(data, cache)
    (x, y), N = problem.train, len(problem.train[0])
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    clock, stages = time.perf_counter(), []
    still = 0.0

    def stage(name: str, post: ntkgp.Posterior) -> None:
        nonlocal still
        post._prepare()
        now = time.perf_counter()
        found = {"name": name, "seconds": now - clock - still, "precision": post.prior.precision.item()}
        found |= {"few": nll(post.predict(problem.test[0][:FEW]).probs, problem.test[1][:FEW])}
        stages.append(found)
        print(found, flush=True)
        still += time.perf_counter() - now

    lin = ntkgp.Linearization(problem.net, example=x[:2])
    prior = ntkgp.priors.Isotropic(lin, problem.start)
    options = {"num_inducing": M, "batch_size": BATCH, "objective": "nystrom", "progress": False}
    for n in FIRST:
        some, weights = order[:n], torch.full((n,), N / n)
        prior.precision = problem.start
        post = ntkgp.fit(lin, (x[some], y[some]), "categorical", "variational", prior, weights=weights, **options)
        validation = tuple(v[:n] for v in problem.valid)
        post.tune(validation=validation, grid=torch.tensor(GRID) / problem.start, progress=False)
        stage(f"{n} weighted images", post)
    post = ntkgp.fit(lin, (x, y), "categorical", "variational", prior, inducing=post.inducing, **options)
    stage("all, Nyström", post)
    post = post.twin(objective="elbo", epochs=2)
    stage("all, ELBO", post)
    predicted = time.perf_counter()
    inside, outside = post.predict(problem.test[0]), post.predict(problem.outside)
    predicting = (time.perf_counter() - predicted) / (len(problem.test[0]) + len(problem.outside))
    alone_in, alone_out = (probabilities(problem.net, x) for x in (problem.test[0], problem.outside))
    entropy = lambda p: torch.special.entr(p).sum(-1)  # noqa: E731
    return {
        "stages": stages,
        "end": scored(inside.probs, problem.test[1]),
        "map": scored(alone_in, problem.test[1]),
        "ood": metrics.ood_auc(entropy(inside.probs), entropy(outside.probs)),
        "ood map": metrics.ood_auc(entropy(alone_in), entropy(alone_out)),
        "predict": predicting,
        "peak": peak_mb(),
        "decay": problem.decay,
        "validation": {str(decay): value for decay, value in problem.validation.items()},
    }


def fashion(args: argparse.Namespace) -> dict:
    """Run ours, then each of theirs, on the same network; parts that are there are not run again."""
    problem, parts = Fashion(args.data, args.cache), args.cache.parent / "variational"
    found = {"ours": kept(parts / "ours.json", lambda: alone(ours, args.data, args.cache, args.threads))}
    runner, grid = HERE / "peers" / "laplace_variational.py", [str(p) for p in GRID]
    with tempfile.TemporaryDirectory() as folder:
        problem.save(path := Path(folder) / "problem.npz")
        common = [path, "--num-inducing", M, "--batch-size", BATCH, "--start", problem.start, "--few", FEW]
        common += ["--threads", args.threads, "--budget", args.budget]
        python = args.peers / "laplace" / "bin" / "python"
        for name, more in PEERS.items():
            command = [python, runner, more[0], *common, *(["--grid", *grid] if "grid" in more else [])]
            run = lambda words=[str(word) for word in command], name=name: run_json(words, name)  # noqa: E731
            found[name] = kept(parts / f"{name.replace(', ', '-').lower()}.json", run)
    for name in PEERS:
        found[name]["behind"] = paired(found["ours"]["end"], found[name]["end"])
    found["ours"]["behind map"] = paired(found["ours"]["end"], found["ours"]["map"])
    curves(found)
    return without_log_probs(found)


def without_log_probs(found: object) -> object:
    if isinstance(found, dict):
        return {name: without_log_probs(value) for name, value in found.items() if name != "log_prob"}
    return [without_log_probs(value) for value in found] if isinstance(found, list) else found


def paired(one: dict, other: dict) -> list[float]:
    """Return by how much the NLL of the first is lower, and the standard error."""
    gap = torch.tensor(one["log_prob"]).double() - torch.tensor(other["log_prob"]).double()
    return [gap.mean().item(), (gap.std() / len(gap) ** 0.5).item()]


def curves(found: dict) -> None:
    figure, ax = plt.subplots(figsize=(5.2, 3.2), layout="constrained")
    stages = found["ours"]["stages"]
    ax.plot([s["seconds"] for s in stages], [s["few"] for s in stages], "o-", label="ntkgp")
    for name in ("VaLLA", "VaLLA, validated"):
        curve = found[name]["curve"]
        ax.plot([s["seconds"] for s in curve], [s["nll"] for s in curve], "s-", label=name)
    ax.axvline(found["ELLA"]["seconds"], color="0.6", linestyle=":", label="ELLA is ready")
    ax.set(xscale="log", xlabel="seconds", ylabel=f"NLL of {FEW} test images", title=f"FashionMNIST, M = {M}")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    figure.savefig(OUT / "fashion.png", dpi=150)
    plt.close(figure)


def sooner(found: dict, name: str) -> tuple[float, str]:
    """Return how many times sooner ours reached each NLL that VaLLA had on the way, the least of them."""
    ratios = []
    for look in found[name]["curve"]:
        reached = [s["seconds"] for s in found["ours"]["stages"] if s["few"] <= look["nll"]]
        ratios.append(look["seconds"] / min(reached) if reached else 0.0)
    told = ", ".join(f"{look['nll']:.4f} at {look['seconds']:.0f} s" for look in found[name]["curve"])
    return min(ratios), told


def fashion_rows(found: dict, table: Table) -> None:
    mine = found["ours"]
    stages = ", ".join(f"{s['few']:.4f} at {s['seconds']:.0f} s ({s['name']})" for s in mine["stages"])
    table.note("FashionMNIST, weight decay by validation", f"{mine['decay']:g}")
    table.note("ntkgp: NLL on the way", stages)
    ready = mine["stages"][-1]["seconds"]
    for name in ("VaLLA", "VaLLA, validated"):
        least, told = sooner(found, name)
        table.at_least(f"{name}: each NLL on the way, ours sooner", least, 5, told)
    for name in PEERS:
        end, (gap, error) = found[name]["end"], found[name]["behind"]
        table.above(
            f"test NLL below {name}'s, nats", gap, 0, f"± {error:.4f}; {mine['end']['nll']:.4f} / {end['nll']:.4f}"
        )
        table.above(
            f"test ECE below {name}'s",
            end["ece"] - mine["end"]["ece"],
            0,
            f"{mine['end']['ece']:.4f} / {end['ece']:.4f}",
        )
        table.at_least(
            f"seconds until ready, {name}",
            found[name]["seconds"] / ready,
            1,
            f"{found[name]['seconds']:.0f} / {ready:.0f} s",
        )
    gap, error = mine["behind map"]
    table.above(
        "test NLL below MAP's, nats", gap, 0, f"± {error:.4f}; {mine['end']['nll']:.4f} / {mine['map']['nll']:.4f}"
    )
    table.note("test ECE", f"{mine['end']['ece']:.4f}, MAP {mine['map']['ece']:.4f}")
    table.above(
        "OOD-AUC against MNIST above MAP's",
        mine["ood"] - mine["ood map"],
        0,
        f"{mine['ood']:.3f} / {mine['ood map']:.3f}",
    )
    peaks = ", ".join(f"{name} {found[name]['peak_mb'] / 1e3:.1f}" for name in PEERS)
    table.note("peak memory, GB", f"ntkgp {mine['peak'] / 1e3:.1f}, {peaks}")


# 4. A pretrained ResNet-20 on CIFAR-10


def cifar_images(data: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images as the network was trained on them, (N, 3, 32, 32), and labels."""
    with np.load(data / "images/cifar10_part.npz") as raw:
        x, y = torch.as_tensor(raw[f"x_{part}"]), torch.as_tensor(raw[f"y_{part}"]).long()
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in IMAGENET)
    return (x.permute(0, 3, 1, 2).float().div(255) - mean) / std, y


def resnet20(data: Path) -> nn.Module:
    """The network with public weights."""
    net = zoo.ResNet20()
    state = torch.load(data / "weights/cifar10_resnet20.th", "cpu", weights_only=True)["state_dict"]
    stage = re.compile(r"module\.(?:layer(\d)\.(\d))?")
    named = lambda found: f"blocks.{3 * int(found[1]) - 3 + int(found[2])}" if found[1] else ""  # noqa: E731
    net.load_state_dict({stage.sub(named, name): weights for name, weights in state.items()})
    return net.eval()


def by_halves(test: tuple[Tensor, Tensor], probs_after: Callable[[tuple[Tensor, Tensor], Tensor], Tensor]) -> Tensor:
    """Return probabilities of all test images, each half's by what was chosen on a few images of the other.

    The network has seen every training image, so that none of them can tell how sure it should be.
    """
    x, y = test
    halves = torch.arange(len(x)) % 2
    p = torch.empty(len(x), int(y.max()) + 1)
    for half in (0, 1):
        here, there = halves == half, halves != half
        p[here] = probs_after((x[there][:CIFAR_VALIDATED], y[there][:CIFAR_VALIDATED]), x[here])
    return p


def cifar(args: argparse.Namespace) -> dict:
    """Score MAP, temperature scaling, last layer, subset GP and variational; what is there is not run again."""
    train, (x, y) = cifar_images(args.data, "train"), cifar_images(args.data, "test")
    net, found, parts = resnet20(args.data), {}, args.cache.parent / "variational"

    def add(name: str, work: Callable[[], Tensor]) -> None:
        def run() -> dict:
            start = time.perf_counter()
            return scored(work(), y) | {"seconds": time.perf_counter() - start, "peak": peak_mb()}

        found[name] = kept(parts / f"cifar-{name.replace(' ', '-').lower()}.json", run)
        told = {key: round(value, 4) for key, value in found[name].items() if isinstance(value, float)}
        print(name, told, flush=True)

    def logits(x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([net(part) for part in x.split(500)])

    def temperature(valid: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
        f, grid = logits(valid[0]), torch.logspace(-0.5, 0.7, 121)
        best = min(grid, key=lambda t: nn.functional.cross_entropy(f / t, valid[1]).item())
        return (logits(x) / best).softmax(-1)

    def posterior(
        method: str, ends: Callable[[ntkgp.Posterior], ntkgp.Posterior] = lambda post: post, **options: object
    ) -> Callable[[], Tensor]:
        def work() -> Tensor:
            lin = ntkgp.Linearization(net, example=train[0][:2])
            post = ntkgp.fit(lin, train, "categorical", method, "isotropic", tune=False, **options)

            def after(valid: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
                post.prior.precision = 1.0
                post.tune(validation=valid, grid=CIFAR_GRID, progress=False)
                print(method, "precision", post.prior.precision.item(), flush=True)
                return ends(post).predict(x, progress=False).probs

            return by_halves((x, y), after)

        return work

    add("MAP", lambda: logits(x).softmax(-1))
    add("temperature", lambda: by_halves((x, y), temperature))
    add("last layer", posterior("last_layer"))
    sparse = {"num_inducing": args.values, "objective": "nystrom", "progress": False}
    add("variational", posterior("variational", lambda post: post.twin(objective="elbo", epochs=3), **sparse))
    add("subset GP", posterior("function", subset=args.subset))
    ahead = paired(found["variational"], found["last layer"])
    for run in found.values():
        run.pop("log_prob")
    return {"methods": found, "ahead": ahead, "values": args.values, "subset": args.subset}


def cifar_rows(found: dict, table: Table) -> None:
    methods = found["methods"]
    for name, s in methods.items():
        told = f"NLL {s['nll']:.4f}, ECE {s['ece']:.4f}, accuracy {s['accuracy']:.4f}; {s['seconds'] / 60:.1f} minutes"
        table.note(f"CIFAR-10, ResNet-20: {name}", told)
    sparse, last, (gap, error) = methods["variational"], methods["last layer"], found["ahead"]
    what = f"CIFAR-10: variational (M = {found['values']})"
    table.above(f"{what}, NLL below last layer's", gap, 0, f"± {error:.4f}")
    table.above(f"{what}, ECE below last layer's", last["ece"] - sparse["ece"], 0, "")


# 6. What a step costs


def step_seconds(N: int, M: int, C: int, n: int = 200, repeats: int = 7) -> float:
    """Return how long a natural-gradient step of n points takes, the rows being kept."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, C))
    x, y = torch.randn(N, 20), torch.randint(C, (N,))
    lin = ntkgp.Linearization(net, example=x[:2])
    prior = ntkgp.priors.Isotropic(lin, 1.0)
    options = {"num_inducing": M, "inducing": "random", "objective": "nystrom", "batch_size": n, "progress": False}
    post = ntkgp.fit(lin, (x, y), "categorical", "variational", prior, nugget=1e-3, **options)
    q, plan = post._q(), post.plan()
    steps = Steps(post, post.process.feed(False), False)
    times = []
    for seed in range(repeats):
        for batch in list(steps.feed.minibatches(n, seed))[:3]:
            start = time.perf_counter()
            measure = steps.on(batch)
            found = measure.under(q, plan.averages, seed)
            torch.linalg.cholesky(measure.natural_step(q, found, 0.1, plan.averages, seed).P)
            times.append(time.perf_counter() - start)
    return median(times)


def step_flops(M: int, C: int, n: int = 200) -> float:
    """Return the multiplications and additions of a step.

    Whitening rows and spreading them by S are triangular solves, n C M² each; Wᵀ Λ W takes 2 n C M² and each of the two
    products by point 2 n C² M; two Cholesky factors and the divergence's inverse M³/3, M³/3 and 2 M³/3.
    """
    return 4 * n * C * M**2 + 4 * n * C**2 * M + 4 / 3 * M**3


def exponent(sizes: list[int], values: list[float]) -> float:
    """Return the slope of logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def cost(args: argparse.Namespace) -> dict:
    """Time steps against N, M and C."""
    Ns, Ms, Cs = [2_000, 8_000, 32_000], [256, 512, 1024, 2048], [5, 10, 20, 40]
    found = {
        "N": {"sizes": Ns, "seconds": [step_seconds(N, 256, 10) for N in Ns]},
        "M": {"sizes": Ms, "seconds": [step_seconds(4_000, m, 10) for m in Ms]},
        "C": {"sizes": Cs, "seconds": [step_seconds(4_000, 512, C) for C in Cs]},
    }
    counted = {"M": [step_flops(m, 10) for m in Ms], "C": [step_flops(512, C) for C in Cs]}
    for name, sizes in (("N", Ns), ("M", Ms), ("C", Cs)):
        found[name]["exponent"] = exponent(sizes, found[name]["seconds"])
        found[name]["counted"] = exponent(sizes, counted[name]) if name in counted else 0.0
    print(found, flush=True)
    return found


def cost_rows(found: dict, table: Table) -> None:
    for name, run in found.items():
        if name in ("N", "M", "C"):
            told = ", ".join(
                f"{1e3 * s:.0f} ms at {size}" for size, s in zip(run["sizes"], run["seconds"], strict=True)
            )
            bar = run["counted"] + (0.1 if name == "N" else 0.25)
            table.at_most(
                f"a step against {name}: exponent", run["exponent"], bar, f"counted {run['counted']:.2f}; {told}"
            )


SECTIONS = {"fashion": (fashion, fashion_rows), "cifar": (cifar, cifar_rows), "cost": (cost, cost_rows)}


def report() -> str:
    """Return the table of the sections that have run, and where they come from."""
    table, origins = Table(), []
    for name, (_, rows) in SECTIONS.items():
        if (path := OUT / f"{name}.json").exists():
            found = json.loads(path.read_text())
            rows(found, table)
            origins.append(f"- {name}: commit {found['commit']}, {found['machine']}, {found['minutes']:.0f} minutes")
    text = "`make bench-variational`, float32, seed 0, section by section; ratios are theirs over ours.\n\n"
    return (
        f"# Sparse variational processes\n\n{text}"
        + "\n".join(origins)
        + f"\n\n{table}\n\n![NLL](variational/fashion.png)\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peers", type=Path, default=Path(".peers"))
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path("build/images"))
    parser.add_argument("--budget", type=float, default=300, help="seconds that VaLLA may train")
    parser.add_argument("--values", type=int, default=400, help="inducing values of the ResNet-20")
    parser.add_argument("--subset", type=int, default=50, help="images of the ResNet-20's subset GP")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    OUT.mkdir(parents=True, exist_ok=True)
    origin = commit()  # of the code that runs, whatever is committed meanwhile
    names = [name for name in args.only.split(",") if name]
    for name in names:
        start = time.perf_counter()
        if len(names) == 1:
            found = SECTIONS[name][0](args) | {"commit": origin, "machine": machine()}
            found["minutes"] = (time.perf_counter() - start) / 60
            (OUT / f"{name}.json").write_text(json.dumps(found, indent=1, default=float) + "\n")
        else:  # a process of its own, so that its peak of memory is its own
            subprocess.run([sys.executable, *sys.argv, "--only", name], check=True)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    text = report()
    (HERE / "results" / "variational.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
