"""The tables and figures of autoencoders.py, from the JSONs it kept."""

import json
from base64 import b64decode, b64encode
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from settings import mean_and_error
from torch import Tensor

mpl.use("Agg")
SCORES = ("likelihood", "typicality", "latent variance", "output variance")
FIT = ("mse", "log p", "expected log p")
PAPER = {  # Table 3: MSE, log p, accuracy, ECE, MCE, RMSCE
    "classifier": (None, None, 0.53, 0.16, 0.25, 0.18),
    "VAE": (104.73, -104.75, 0.22, 0.18, 0.34, 0.19),
    "MC-AE": (106.05, -106.05, 0.45, 0.28, 0.38, 0.29),
    "AE ensemble": (96.23, -100.94, 0.53, 0.12, 0.2, 0.13),
    "LAE post hoc": (101.62, -107.25, 0.51, 0.16, 0.27, 0.18),
    "LAE online": (99.59, -106.29, 0.53, 0.12, 0.16, 0.13),
}
LEADERS = ("LAE online", "LAE online, Kronecker", "LAE online, from scratch, Kronecker")
SHOWN = ("VAE", "MC-AE", "AE ensemble", "LAE post hoc", *LEADERS)
CODED = ("AE", "VAE", "MC-AE", "AE ensemble", "LAE post hoc", "LAE online")


def report(out: Path, S: dict, order: list[str]) -> str:
    """Write autoencoders.md and its figures, of what is there, models in this order."""
    found = [json.loads(path.read_text()) for path in out.glob("autoencoders-*.json")]
    found.sort(key=lambda run: (order.index(run["model"]), run["seed"]))
    if not found:
        return "nothing has run yet"
    parts: dict[str, dict[str, list[dict]]] = {"ood": {}, "fewer": {}, "digits": {}}
    for run in found:
        parts[run["experiment"]].setdefault(run["model"], []).append(run)
    digits = {name: runs[0] for name, runs in parts["digits"].items()}
    commits, minutes = ", ".join(sorted({r["commit"] for r in found})), sum(r["minutes"] for r in found)
    lines = ["# Autoencoders", ""]
    lines += [
        f"`make reproduce-training`, seeds {S['ood']['seeds']} and {S['digits']['seeds']}, settings in training.json; "
        f"{minutes:.0f} minutes; {found[0]['machine']}, commits {commits}. Log densities are in nats an image, squared "
        "errors are sums over pixels.",
        "",
    ]
    if parts["ood"]:
        lines += _ood(parts["ood"], S["ood"]) + _leads(parts["ood"]) + _histograms(out, parts["ood"])
    if parts["fewer"]:
        lines += _ood(parts["fewer"], S["ood"] | S["fewer"]) + _leads(parts["fewer"])
    lines += _digits(out, digits) if digits else []
    text = "\n".join(lines)
    (out / "autoencoders.md").write_text(text)
    return text


def _ood(found: dict[str, list[dict]], E: dict) -> list[str]:
    title = f"## {E['data']}, {E['train']:,} images, against {E['outside']}: AUROC by score"
    lines = [title, "", "Means ± standard errors over seeds.", ""]
    lines += ["| | " + " | ".join(SCORES) + " | squared error | log p(x) | mean of log p |", "|---" * 8 + "|"]
    for name, seeds in found.items():
        cells = [mean_and_error([run["auroc"][score] for run in seeds], 3) for score in SCORES]
        cells += [mean_and_error([run[key] for run in seeds], 2) for key in FIT]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _leads(found: dict[str, list[dict]]) -> list[str]:
    """Tell by how much online training leads, seed by seed."""
    leaders = {name: {run["seed"]: run["auroc"] for run in found[name]} for name in LEADERS if name in found}
    columns = [(leader, score) for leader in leaders for score in SCORES[2:]]
    lines = ["By how much online leads, means ± standard errors of differences seed by seed:", ""]
    lines += ["| | " + " | ".join(f"{leader}: {score}" for leader, score in columns) + " |"]
    lines += ["|---" * (len(columns) + 1) + "|"]
    for name, runs in found.items():
        cells = []
        for leader, score in columns:
            own = leaders[leader]
            lead = [own[run["seed"]][score] - run["auroc"][score] for run in runs if run["seed"] in own]
            cells.append(mean_and_error(lead, 3) if lead and name != leader else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""] if leaders else []


def _histograms(out: Path, found: dict[str, list[dict]]) -> list[str]:
    runs = {name: seeds[0] for name, seeds in found.items()}
    shown = [name for name in SHOWN if name in runs]
    if not shown:
        return []
    figure, axes = plt.subplots(2, len(shown), figsize=(2.2 * len(shown), 3.6), layout="constrained", squeeze=False)
    for column, name in zip(axes.T, shown, strict=True):
        for ax, score in zip(column, SCORES[2:], strict=True):
            h = runs[name]["histograms"][score]
            for which in ("inside", "outside"):
                counts = np.array(h[which])
                ax.stairs(counts / counts.sum(), h["edges"], fill=True, alpha=0.5, label=which)
            ax.locator_params(axis="x", nbins=3)
            ax.set_xlabel(score, loc="left")  # on the right stands the power of ten, if any
        column[0].set(title=name.replace(", ", ",\n"))
        column[0].title.set_fontsize(8)
    axes[0, 0].legend(frameon=False, fontsize=7)
    figure.savefig(out / "autoencoders_variances.png", dpi=150)
    plt.close(figure)
    return ["![variances inside and outside](autoencoders_variances.png)", ""]


def _fit(run: dict) -> list[str]:
    return [f"{run[key]:.2f}" for key in FIT]


def _digits(out: Path, runs: dict[str, dict]) -> list[str]:
    models = {name: run for name, run in runs.items() if name != "classifier"}
    lines = [
        "## Digits",
        "",
        "| | squared error | log p(x) | mean of log p | median std of a weight |",
        "|---" * 5 + "|",
    ]
    for name, run in models.items():
        spread = f"{run['weight std']:.4f}" if "weight std" in run else ""
        lines.append(f"| {name} | " + " | ".join([*_fit(run), spread]) + " |")
    lines += ["", "### Upper halves filled in", ""]
    lines += [
        "log p is that of the missing pixels under unit noise around the samples, without its constant; in brackets "
        "the paper's, whose network and normalisation differ.",
        "",
        "| | squared error | log p | accuracy | ECE | MCE | RMSCE |",
        "|---" * 7 + "|",
    ]
    for name, run in runs.items():
        part = run.get("imputation", {"mse": None, "log p": None, "classified": run.get("classified")})
        judged = part["classified"]
        values = [part["mse"], part["log p"], *(judged[key] for key in ("accuracy", "ece", "mce", "rmsce"))]
        forms = (".1f", ".1f", ".3f", ".3f", ".3f", ".3f")
        paper = PAPER.get(name, (None,) * 6)
        cells = [_cell(*each) for each in zip(values, forms, paper, strict=True)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += _neighbours(out, models) + _maps(out, models) + _images(out, models)
    return lines


def _cell(value: float | None, form: str, paper: float | None) -> str:
    if value is None:
        return ""
    return f"{value:{form}}" + ("" if paper is None else f" ({paper:g})")


def _neighbours(out: Path, models: dict[str, dict]) -> list[str]:
    shown = {name: models[name]["neighbours"] for name in CODED if name in models}
    counts = list(next(iter(shown.values())))
    lines = ["", "### Nearest neighbours among codes: accuracy by labels a class", ""]
    lines += ["| | " + " | ".join(counts) + " |", "|---" * (len(counts) + 1) + "|"]
    figure, ax = plt.subplots(figsize=(4.5, 3), layout="constrained")
    for name, by_count in shown.items():
        means, errors = zip(*((np.mean(v), np.std(v, ddof=1) / len(v) ** 0.5) for v in by_count.values()), strict=True)
        lines.append(
            f"| {name} | " + " | ".join(f"{m:.3f} ± {e:.3f}" for m, e in zip(means, errors, strict=True)) + " |"
        )
        ax.errorbar([int(c) for c in by_count], means, errors, marker="o", ms=3, label=name)
    ax.set(xscale="log", xlabel="labels a class", ylabel="accuracy")
    ax.legend(frameon=False, fontsize=7)
    figure.savefig(out / "autoencoders_neighbours.png", dpi=150)
    plt.close(figure)
    return [*lines, "", "![accuracy by labels](autoencoders_neighbours.png)", ""]


def _maps(out: Path, models: dict[str, dict]) -> list[str]:
    shown = [name for name in ("VAE", "LAE post hoc", "LAE online") if name in models]
    if not shown:
        return []
    figure, axes = plt.subplots(1, len(shown), figsize=(3 * len(shown), 2.8), layout="constrained", squeeze=False)
    for ax, name in zip(axes[0], shown, strict=True):
        m = models[name]["map"]
        (a, b), (ra, rb) = m["centre"], m["reach"]
        image = ax.imshow(np.array(m["std"]).T, origin="lower", extent=(a - ra, a + ra, b - rb, b + rb), aspect="auto")
        codes = np.array(m["codes"])
        ax.scatter(codes[:, 0], codes[:, 1], c=m["labels"], cmap="tab10", s=3)
        ax.set(title=name)
        figure.colorbar(image, ax=ax)
    figure.savefig(out / "autoencoders_latent.png", dpi=150)
    plt.close(figure)
    return ["![standard deviation of decoded images over the latent space](autoencoders_latent.png)", ""]


def as_text(x: Tensor) -> list[str]:  # (N, 1, 28, 28)
    """Return images as text, a byte a pixel."""
    return [b64encode(image.mul(255).round().clamp(0, 255).byte().numpy().tobytes()).decode() for image in x]


def _image(text: str) -> np.ndarray:
    return np.frombuffer(b64decode(text), np.uint8).reshape(28, 28)


def _images(out: Path, models: dict[str, dict]) -> list[str]:
    """Draw test digits, what upper halves were filled in, chain by chain, and new images."""
    shown = [name for name in SHOWN if name in models]
    if not shown:
        return []
    first = models[shown[0]]["imputation"]
    rows = len(first["filled"]) + 2
    figure, axes = plt.subplots(rows, len(shown), figsize=(1.9 * len(shown), 0.5 * rows), layout="constrained")
    for column, name in zip(np.atleast_2d(axes).reshape(rows, -1).T, shown, strict=True):
        part = models[name]["imputation"]
        for ax, line in zip(column, [part["truth"], *part["filled"], part["new"]], strict=True):
            ax.imshow(np.concatenate([_image(text) for text in line], axis=1), cmap="gray_r", vmin=0, vmax=255)
            ax.set_axis_off()
        column[0].set_title(name, fontsize=7)
    figure.savefig(out / "autoencoders_images.png", dpi=150)
    plt.close(figure)
    return ["![digits, five ways to fill in their upper halves, and new ones](autoencoders_images.png)", ""]
