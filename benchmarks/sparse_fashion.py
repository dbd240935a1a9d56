"""All of FashionMNIST through a hundred inducing values, beside VaLLA and ELLA on the same network."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import ntkgp
from ntkgp.report import metrics

sys.path.insert(0, str(Path(__file__).parent / "reproduce"))
from harness import HERE, Table, alone, kept, peak_mb, run_json
from images import DECAYS, EPOCHS, Networks, images, nll, probabilities
from kernel import lenet
from sparse_scores import LINKS, POINTWISE, TEMPERATURES, paired, scored

__all__ = ["fashion", "fashion_rows"]

mpl.use("Agg")
FIGURE = HERE / "results" / "variational" / "fashion.png"
M, BATCH = 100, 100  # inducing values and points in a minibatch, ours and theirs
GRID = [100.0, 300.0, 1000.0, 3000.0, 10000.0]  # precisions, ours and theirs
PEERS = {"VaLLA": ["valla"], "VaLLA, validated": ["valla", "grid"], "ELLA": ["ella", "grid"]}
VALIDATED, FEW = 1000, 1000  # validation images, and test images that all are watched on
FIRST = 100, VALIDATED  # weighted images of first fits, and as many validation images to choose the precision with
ENSEMBLE = 3


class Fashion:
    """The images, and the LeNet whose weight decay has the best validation NLL."""

    def __init__(self, data: Path, cache: Path) -> None:
        self.train, self.test = (images(data, "fashion_mnist", part) for part in ("train", "test"))
        self.outside = images(data, "mnist", "test")[0]
        x, y = self.train
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        seen, kept = order[5000:], order[:5000]
        self.networks = Networks(cache / "fashion_mnist", x[seen], y[seen], EPOCHS["fashion_mnist"])
        nets = {decay: self.networks.get(f"map-{decay:g}", lenet, decay, seed=0) for decay in DECAYS}
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


def ours(data: Path, cache: Path, threads: int) -> dict:
    """Fit a few weighted images, choose precision and link by validation, fit all: untrained, then by the ELBO."""
    torch.set_num_threads(threads)
    problem = Fashion(data, cache)
    (x, y), N = problem.train, len(problem.train[0])
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    clock, stages = time.perf_counter(), []
    still, link = 0.0, LINKS[0]

    def stage(name: str, post: ntkgp.Posterior) -> None:
        nonlocal still
        post._prepare()
        now = time.perf_counter()
        found = {"name": name, "seconds": now - clock - still, "precision": post.prior.precision.item(), "link": link}
        found |= {"few": nll(post.predict(problem.test[0][:FEW], link=link).probs, problem.test[1][:FEW])}
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
        link = min(LINKS, key=lambda link: nll(post.predict(validation[0], link=link).probs, validation[1]))
        stage(f"{n} weighted images", post)
    post = ntkgp.fit(lin, (x, y), "categorical", "variational", prior, inducing=post.inducing, **options)
    stage("all, Nyström", post)
    post = post.twin(objective="elbo", epochs=2)
    stage("all, ELBO", post)
    predicted = time.perf_counter()
    inside, outside = (post.predict(x, link=link) for x in (problem.test[0], problem.outside))
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
        "link": link,
        "validation": {str(decay): value for decay, value in problem.validation.items()},
    }


def others(data: Path, cache: Path, threads: int) -> dict:
    """Score what people would pick: a temperature by the same validation images, and an ensemble with more networks."""
    torch.set_num_threads(threads)
    problem = Fashion(data, cache)
    (x, y), (valid, known) = problem.test, problem.valid
    log_p = probabilities(problem.net, valid).log()
    best = min(TEMPERATURES, key=lambda t: nn.functional.cross_entropy(log_p / t, known).item())
    start = time.perf_counter()
    nets = [problem.net]
    for seed in range(1, ENSEMBLE):
        nets.append(problem.networks.get(f"member-{seed}", lenet, problem.decay, seed=seed))
    seconds = time.perf_counter() - start
    predicted = {
        "temperature": lambda x: (probabilities(problem.net, x).log() / best).softmax(-1),
        "ensemble": lambda x: torch.stack([probabilities(net, x) for net in nets]).mean(0),
    }
    entropy = lambda x: torch.special.entr(x).sum(-1)  # noqa: E731
    found = {"members": ENSEMBLE, "training": seconds, "chosen": best.item()}
    for name, predict in predicted.items():
        inside, outside = predict(x), predict(problem.outside)
        found[name] = scored(inside, y) | {"ood": metrics.ood_auc(entropy(inside), entropy(outside))}
    return found


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
    found["others"] = kept(parts / "others.json", lambda: alone(others, args.data, args.cache, args.threads))
    for name in ("temperature", "ensemble"):
        found["others"][name]["behind"] = paired(found["ours"]["end"], found["others"][name])
    found["ours"]["behind map"] = paired(found["ours"]["end"], found["ours"]["map"])
    curves(found)
    return brief(found)


def brief(found: object) -> object:
    if isinstance(found, dict):
        return {name: brief(value) for name, value in found.items() if name not in POINTWISE}
    return [brief(value) for value in found] if isinstance(found, list) else found


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
    figure.savefig(FIGURE, dpi=150)
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
    table.note("ntkgp: precision and link by validation", f"{mine['stages'][-1]['precision']:.0f}, {mine['link']}")
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
    for name in ("temperature", "ensemble"):
        other, (gap, error) = found["others"][name], found["others"][name]["behind"]
        told = f"NLL {other['nll']:.4f}, {gap:+.4f} ± {error:.4f} above ours, "
        told += f"ECE {other['ece']:.4f}, OOD-AUC {other['ood']:.3f}"
        table.note(f"FashionMNIST, {name}", told)
    trained = (
        f"{found['others']['members']} networks, {found['others']['training']:.0f} s to train those beside the first"
    )
    table.note("FashionMNIST, the ensemble", trained)
    table.above(
        "OOD-AUC against MNIST above MAP's",
        mine["ood"] - mine["ood map"],
        0,
        f"{mine['ood']:.3f} / {mine['ood map']:.3f}",
    )
    peaks = ", ".join(f"{name} {found[name]['peak_mb'] / 1e3:.1f}" for name in PEERS)
    table.note("peak memory, GB", f"ntkgp {mine['peak'] / 1e3:.1f}, {peaks}")
