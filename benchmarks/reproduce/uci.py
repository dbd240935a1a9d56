r"""Table 1 and Figure 5 of the local-linearisation paper (Immer et al. 2021): eight UCI classification tasks.

    python benchmarks/reproduce/uci.py --data ../shared/data [--datasets a,b] [--splits 10] [--out docs/results/uci]

Every (data set, split) is one JSON file in ``out``/splits; a file that is there is not computed again, so an
interrupted run resumes. Tables and figures are made from the files at the end. One thread.

Protocol, as in the paper and its authors' code where not said otherwise: stratified splits 70/15/15 under the authors'
seeds, features standardised on the training part, two hidden layers of 50 tanh units, one logit and a Bernoulli
likelihood for two classes, 1000 Monte Carlo samples, isotropic prior N(0, 1/precision) on all weights.
"""

import argparse
import json
import math
import platform
import subprocess
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn.functional import softplus
from uci_report import write_report

import ntkgp
from ntkgp.likelihoods import Bernoulli, Categorical, Likelihood
from ntkgp.posteriors import Posterior, Prediction
from ntkgp.posteriors.prediction import Latent, predictive_of
from ntkgp.posteriors.subsets import Stratified
from ntkgp.report import metrics

SEEDS = (711, 1, 75, 359, 17, 420, 129, 666, 69, 36)  # the authors' own, of splits and networks
WIDTH = 50
NUM_SAMPLES = 1000
GP_VALUES = 6000  # how many latent values, points times outputs, the GP column conditions on
DECADES = (0.01, 0.1, 1.0, 10.0, 100.0)
HALF_DECADES = tuple(np.logspace(-2, 2, 9).round(4).tolist())
QUARTERS = (1.7783, 5.6234, 17.7828)  # where the validation NLL turns, between half decades
REFINED = {"GLM refine": "GLM", "GLM refine diag": "GLM diag"}


@dataclass(frozen=True)
class Task:
    """A data set and what its size asks for: precisions by method first of all."""

    file: str
    dtype: torch.dtype = torch.float64
    precisions: tuple[float, ...] = HALF_DECADES  # of MAP and GLM diag
    full: tuple[float, ...] = HALF_DECADES  # of GLM and GP
    sampled: tuple[float, ...] = HALF_DECADES  # of BNN, some of ``full``
    mean_field: tuple[float, ...] = DECADES
    refined: int = 2  # how many precisions, the best of the base by validation, are refined
    descends: bool = False  # whether to go on below the best of them for as long as validation gains by it
    refine_options: tuple[tuple[str, float], ...] = (("tolerance", 1e-3), ("max_steps", 20))
    batch: int | None = None  # of the training of MAP and MFVI; None for all points
    inducing: int = 100  # values of the variational column


SINGLE = {"dtype": torch.float32, "refine_options": (("tolerance", 1e-2), ("max_steps", 10), ("num_samples", 128))}
MEDIUM = SINGLE | {
    "precisions": tuple(sorted(HALF_DECADES[2:] + QUARTERS)),
    "full": tuple(sorted(HALF_DECADES[2:] + QUARTERS)),
    "sampled": HALF_DECADES[2:],
    "mean_field": DECADES[1:],
    "refined": 1,
    "refine_options": (("tolerance", 1e-2), ("max_steps", 6), ("num_samples", 128)),
}
LARGE = MEDIUM | {
    "precisions": HALF_DECADES,
    "descends": True,
    "full": HALF_DECADES[4:8],
    "sampled": HALF_DECADES[4:8],
    "batch": 512,
}
TASKS = {
    "australian": Task("australian"),
    "cancer": Task("breast_cancer"),
    "ionosphere": Task("ionosphere"),
    "glass": Task("glass", **SINGLE),
    "vehicle": Task("vehicle", **MEDIUM),
    "waveform": Task("waveform", **MEDIUM),
    "digits": Task("digits", **LARGE),
    "satellite": Task("satellite", **LARGE),
}


# Data


@dataclass(frozen=True)
class Split:
    """Training, validation and test part, (x, y) each."""

    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    num_classes: int

    @property
    def asked(self) -> Tensor:
        """All inputs to predict at: validation, then test."""
        return torch.cat([self.valid[0], self.test[0]])


def split_of(folder: Path, task: Task, seed: int) -> Split:
    if task.file == "digits":
        X, y = load_digits(return_X_y=True)
    else:
        with np.load(folder / "uci_classification" / f"{task.file}.npz") as found:
            X, y = found["X"], found["y"]
    x, rest, y_train, y_rest = train_test_split(X, y, train_size=0.7, random_state=seed, stratify=y)
    test, valid, y_test, y_valid = train_test_split(rest, y_rest, train_size=0.5, random_state=seed, stratify=y_rest)
    scale = StandardScaler().fit(x)
    pairs = [
        (torch.as_tensor(scale.transform(a)).to(task.dtype), torch.as_tensor(b))
        for a, b in ((x, y_train), (valid, y_valid), (test, y_test))
    ]
    return Split(*pairs, num_classes=int(y.max()) + 1)


# MAP and mean-field networks, trained for all precisions at once: S networks are one batch of matrix products

Layers = list[tuple[Tensor, Tensor]]  # weights (S, in, out) and biases (S, 1, out)


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs))
    )


def stacked(net: nn.Sequential, copies: int) -> Layers:
    """Return leaves of ``copies`` networks that all start where ``net`` is."""
    pairs = [(layer.weight.detach().mT, layer.bias.detach()) for layer in net if isinstance(layer, nn.Linear)]
    return [(W.repeat(copies, 1, 1).requires_grad_(), b.repeat(copies, 1, 1).requires_grad_()) for W, b in pairs]


def unstacked(layers: Layers, s: int, dtype: torch.dtype) -> nn.Sequential:
    """Return network s."""
    net = mlp(layers[0][0].shape[1], layers[-1][0].shape[2])
    linear = [layer for layer in net if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for layer, (W, b) in zip(linear, layers, strict=True):
            layer.weight.copy_(W[s].mT)
            layer.bias.copy_(b[s, 0])
    return net.to(dtype)


def outputs(layers: Layers, x: Tensor) -> Tensor:  # (N, D) -> (S, N, C)
    h = x.expand(len(layers[0][0]), *x.shape)
    for i, (W, b) in enumerate(layers):
        h = torch.baddbmm(b, h if i == 0 else h.tanh(), W)
    return h


def noisy_outputs(means: Layers, rhos: Layers, x: Tensor) -> Tensor:  # (N, D) -> (S, N, C)
    """Return outputs under weights of the mean-field posterior, drawn anew for each point (local reparameterisation).

    The S networks share their noise, which leaves each of them as it is.
    """
    h = x.expand(len(means[0][0]), *x.shape)
    for i, ((W, b), (rho_W, rho_b)) in enumerate(zip(means, rhos, strict=True)):
        h = h if i == 0 else h.tanh()
        variance = torch.baddbmm(softplus(rho_b).square(), h.square(), softplus(rho_W).square())
        h = torch.baddbmm(b, h, W) + variance.sqrt() * torch.randn(x.shape[0], W.shape[2])
    return h


def trained(data: tuple[Tensor, Tensor], net: nn.Sequential, precisions: Tensor, batch: int | None) -> Layers:
    """Return the S networks that maximise log p(y | θ) + log N(θ; 0, I / precision)."""
    layers = stacked(net, len(precisions))

    def loss(x: Tensor, y: Tensor, scale: float) -> Tensor:
        decay = sum((precisions * p.square().sum((1, 2))).sum() for layer in layers for p in layer)
        return scale * negative_log_likelihood(outputs(layers, x), y) + decay / 2

    minimise(
        loss, [p for layer in layers for p in layer], data, batch, steps=1000 if batch is None else 2000, rate=1e-2
    )
    return layers


def mean_field(
    data: tuple[Tensor, Tensor], net: nn.Sequential, precisions: Tensor, batch: int | None
) -> tuple[Layers, Layers]:
    """Return means and softplus⁻¹ of standard deviations that maximise the evidence lower bound."""
    means, rhos = stacked(net, len(precisions)), stacked(net, len(precisions))
    leaves = [p for layer in means + rhos for p in layer]
    with torch.no_grad():
        for layer in rhos:
            for rho in layer:
                rho.fill_(-5.0)

    def divergence(mean: Tensor, rho: Tensor) -> Tensor:
        variance = precisions.view(-1, 1, 1) * softplus(rho).square()
        return (precisions.view(-1, 1, 1) * mean.square() + variance - 1 - variance.log()).sum() / 2

    def loss(x: Tensor, y: Tensor, scale: float) -> Tensor:
        pairs = zip((p for layer in means for p in layer), (p for layer in rhos for p in layer), strict=True)
        return scale * negative_log_likelihood(noisy_outputs(means, rhos, x), y) + sum(divergence(*p) for p in pairs)

    minimise(loss, leaves, data, batch, steps=800 if batch is None else 1600, rate=2e-2)
    return means, rhos


def negative_log_likelihood(f: Tensor, y: Tensor) -> Tensor:  # (S, N, C), (N,)
    if f.shape[-1] == 1:
        return softplus(f.squeeze(-1) * (1 - 2 * y)).sum()
    log_p = f.log_softmax(-1)
    return -log_p.gather(-1, y.expand(f.shape[:-1]).unsqueeze(-1)).sum()


def minimise(loss, leaves: list[Tensor], data: tuple[Tensor, Tensor], batch: int | None, steps: int, rate: float):
    """Take Adam steps, on all data or batches drawn from them, under a cosine schedule."""
    x, y = data[0].float(), data[1]
    optimiser = torch.optim.Adam(leaves, lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, eta_min=rate / 100)
    for _ in range(steps):
        some = slice(None) if batch is None or batch >= len(y) else torch.randint(len(y), (batch,))
        optimiser.zero_grad()
        loss(x[some], y[some], len(y) / len(y[some])).backward()
        optimiser.step()
        schedule.step()


# Scores


def scores(prediction: Prediction, split: Split) -> dict[str, dict[str, float]]:
    """Return the scores of a prediction at ``split.asked``, part by part."""
    probs = prediction.probs
    probs = probs if probs.shape[1] > 1 else torch.cat([1 - probs, probs], dim=1)
    y = torch.cat([split.valid[1], split.test[1]])
    log_prob, middle = prediction.log_prob(y), len(split.valid[1])
    return {
        part: {
            "nll": -log_prob[some].mean().item(),
            "accuracy": metrics.accuracy(probs[some], y[some]),
            "ece": metrics.expected_calibration_error(probs[some], y[some]),
        }
        for part, some in (("valid", slice(None, middle)), ("test", slice(middle, None)))
    }


@torch.no_grad()
def mean_field_prediction(posterior: tuple[Layers, Layers], s: int, likelihood: Likelihood, x: Tensor) -> Prediction:
    one = [[(W[s : s + 1], b[s : s + 1]) for W, b in layers] for layers in posterior]
    draws = torch.stack([noisy_outputs(*one, x.float())[0] for _ in range(NUM_SAMPLES)])
    return predictive_of(likelihood, [Latent(samples=draws)], "mc", NUM_SAMPLES, torch.Generator().manual_seed(0))


# One split


def run(split: Split, task: Task, seed: int, known: dict, pooled: dict[str, float]) -> dict:
    """Return the scores of every method at every precision, and what they took; ``known`` ones are not made again.

    Refined are the best precisions of this split, and those ``pooled``, by base, that are best over all splits.
    """
    torch.manual_seed(seed)
    C = 1 if split.num_classes == 2 else split.num_classes
    likelihood = Bernoulli() if C == 1 else Categorical()
    start = mlp(split.train[0].shape[1], C)
    N, P = len(split.train[1]), sum(p.numel() for p in start.parameters())
    points = min(N, GP_VALUES // C)
    subset = None if points == N else Stratified(points, seed)
    # On all data both spaces hold the same posterior, refined or not (tests/posteriors): take the smaller one.
    exact = "function" if N * C <= P else "full"
    clock, found = Clock(known.get("seconds", {})), Scores(known.get("scores", {}))

    layers = trained(split.train, start, torch.tensor(task.precisions), task.batch)
    clock.lap("MAP")
    if missing := found.missing("MFVI", task.mean_field):
        factors = mean_field(split.train, start, torch.tensor(missing), task.batch)
        for s, precision in enumerate(missing):
            found.add("MFVI", precision, scores(mean_field_prediction(factors, s, likelihood, split.asked), split))
        clock.lap("MFVI")

    def posterior(precision: float, method: str, dtype: torch.dtype = task.dtype, **options) -> Posterior:
        lin = ntkgp.Linearization(unstacked(layers, task.precisions.index(precision), dtype))
        prior = ntkgp.priors.Isotropic(lin, precision=precision)
        return ntkgp.fit(lin, (split.train[0].to(dtype), split.train[1]), likelihood, method, prior, **options)

    def add(name: str, precision: float, posterior: Posterior, predictive: str = "glm") -> None:
        prediction = posterior.predict(split.asked.to(posterior.lin.dtype), predictive, num_samples=NUM_SAMPLES)
        found.add(name, precision, scores(prediction, split) | certificate(posterior))
        clock.lap(name)

    for precision in found.missing("GLM diag", task.precisions):
        diagonal = posterior(precision, "diag")
        add("MAP", precision, diagonal, "map")
        add("GLM diag", precision, diagonal)
    for precision in found.missing("GLM", task.full):
        glm = posterior(precision, exact)
        add("GLM", precision, glm)
        if precision in task.sampled:
            add("BNN", precision, glm if exact == "full" else posterior(precision, "full", torch.float32), "bnn")
        if subset is None and exact == "function":
            found.add("GP", precision, found.table["GLM"][precision])
        else:
            add("GP", precision, posterior(precision, "function", subset=subset))
    for precision in found.missing("variational", task.full):
        add("variational", precision, posterior(precision, "variational", num_inducing=task.inducing, seed=seed))
    for name, base in REFINED.items():
        method = exact if base == "GLM" else "diag"
        while missing := found.missing(name, to_refine(task, found, name, pooled)):
            refined = posterior(missing[0], method).refine("variational", **dict(task.refine_options))
            add(name, missing[0], refined)
    sizes = {"train": N, "valid": len(split.valid[1]), "test": len(split.test[1]), "parameters": P, "outputs": C}
    how = {"sizes": sizes, "gp_points": points, "space": exact}
    return how | {"seconds": clock.seconds, "scores": found.table}


def to_refine(task: Task, found: "Scores", name: str, pooled: dict[str, float]) -> list[float]:
    """Return the precisions at which a method is refined, as far as they are known.

    These are the best of its base on this split, the best over all of them, and, as means that are refined follow the
    data more closely and want less of them averaged away, those below the best for as long as validation gains by it.
    """
    base = REFINED[name]
    wanted = [*found.best(base, task.refined), *([pooled[base]] if base in pooled else [])]
    if task.descends:
        nll = found.validation(name)
        for p in sorted((p for p in task.precisions if p <= wanted[0]), reverse=True):
            wanted.append(p)
            if p not in nll or nll[p] > min(nll[q] for q in wanted if q in nll):
                break
    return [*dict.fromkeys(wanted)]


def complete(task: Task, found: "Scores", pooled: dict[str, float]) -> bool:
    """Say whether nothing is missing."""
    grids = {"MFVI": task.mean_field, "GLM diag": task.precisions, "GLM": task.full, "variational": task.full}
    if any(found.missing(method, precisions) for method, precisions in grids.items()):
        return False
    return not any(found.missing(name, to_refine(task, found, name, pooled)) for name in REFINED)


def certificate(posterior: Posterior) -> dict[str, dict]:
    """Say how well a refined mean solves its equation; empty if it is not refined."""
    return {} if posterior.certificate is None else {"certificate": asdict(posterior.certificate)}


class Scores:
    """Method -> precision -> part -> score -> number."""

    def __init__(self, known: dict[str, dict[str, dict]]) -> None:
        self.table = {method: {float(p): row for p, row in rows.items()} for method, rows in known.items()}

    def add(self, method: str, precision: float, found: dict) -> None:
        """Keep what a method scores at a precision."""
        self.table.setdefault(method, {})[precision] = found

    def missing(self, method: str, precisions: Iterable[float]) -> list[float]:
        """Return the precisions at which a method has no scores yet."""
        return [p for p in precisions if p not in self.table.get(method, {})]

    def validation(self, method: str) -> dict[float, float]:
        """Return the validation NLL by precision."""
        return {precision: row["valid"]["nll"] for precision, row in self.table.get(method, {}).items()}

    def best(self, method: str, count: int) -> list[float]:
        """Return the precisions with the lowest validation NLL."""
        nll = self.validation(method)
        return sorted(nll, key=lambda p: nll[p] if math.isfinite(nll[p]) else math.inf)[:count]


class Clock:
    """Seconds by name."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = dict(seconds)
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Give the time since the last lap to a name."""
        now = time.perf_counter()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now - self._last, 2)
        self._last = now


# All of them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--datasets", default=",".join(TASKS))
    parser.add_argument("--splits", type=int, default=len(SEEDS), help="at most so many")
    parser.add_argument("--out", type=Path, default=Path("docs/results/uci"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # under a precision of 100 gradients vanish, and denormal numbers are slow
    (args.out / "splits").mkdir(parents=True, exist_ok=True)
    names, ks = args.datasets.split(","), range(args.splits)
    for pooling in (False, True):
        for name in names:
            pooled = best_over_splits(args.out, name) if pooling else {}
            for k in ks:
                one(args, name, k, pooled)
    write_report(args.out)


def one(args: argparse.Namespace, name: str, k: int, pooled: dict[str, float]) -> None:
    """Make what a split does not have yet."""
    task, path = TASKS[name], path_of(args.out, name, k)
    known = json.loads(path.read_text()) if path.exists() else {}
    if complete(task, Scores(known.get("scores", {})), pooled):
        return
    began = time.perf_counter()
    found = run(split_of(args.data, task, SEEDS[k]), task, SEEDS[k], known, pooled)
    record = {"dataset": name, "split": k, "seed": SEEDS[k], "dtype": str(task.dtype), **where()}
    commits = [*known.get("commit", "").split(", "), record["commit"]]
    record["commit"] = ", ".join(dict.fromkeys(commits)).strip(", ")
    path.write_text(json.dumps(record | found, indent=1))
    chosen = {m: min(rows.values(), key=lambda row: row["valid"]["nll"]) for m, rows in found["scores"].items()}
    told = "  ".join(f"{m} {row['valid']['nll']:.3f}" for m, row in chosen.items())
    print(f"{name} {k}: {time.perf_counter() - began:.0f} s; validation NLL: {told}", flush=True)


def path_of(out: Path, name: str, k: int) -> Path:
    return out / "splits" / f"{name}_{k}.json"


def best_over_splits(out: Path, name: str) -> dict[str, float]:
    """Return the precision of each base with the lowest validation NLL in the mean over all splits; {} before then."""
    paths = [path_of(out, name, k) for k in range(len(SEEDS))]
    if not all(path.exists() for path in paths):
        return {}
    splits = [Scores(json.loads(path.read_text())["scores"]) for path in paths]
    found = {}
    for base in REFINED.values():
        shared = set.intersection(*(set(split.table[base]) for split in splits))
        found[base] = min(shared, key=lambda p: sum(split.table[base][p]["valid"]["nll"] for split in splits))
    return found


def where() -> dict[str, str]:
    """Say at which commit and on which machine this runs."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    machine = f"{cpu[0].split(':')[1].strip() if cpu else platform.processor()}, {len(cpu)} cores, one thread used"
    return {"commit": commit.stdout.strip(), "machine": machine, "torch": torch.__version__}


if __name__ == "__main__":
    main()
