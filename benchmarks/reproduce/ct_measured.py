"""Reconstruction from real measurements: the Helsinki challenge's limited angles, and a tooth from 30 angles of 181.

    python benchmarks/reproduce/ct_measured.py --data DIR [--only helsinki-01a] [--choose] [--report]

Settings stand in ct_measured.json. The penalty of total variation was chosen where nothing is scored (``--choose``):
on the b samples of the challenge, and on the other slice of the tooth; the network is trained on the same objective,
½ ‖A x − y‖² + λ TV(x). Nothing is told of what is scanned, neither to our method nor to the others, but that
attenuation is not negative, and in its unit at most one. Each case has a process of its own, one JSON and one figure
under ``--out``, and what is there is not run again; networks and the state of EM are kept under ``--cache``.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ntkgp.inverse import RayTransform, UNet, linearized, total_variation_reconstruction, train
from ntkgp.inverse.deep_image_prior import DeepImagePrior
from ntkgp.inverse.reconstruction import Reconstruction

sys.path.insert(0, str(Path(__file__).parent.parent))
from harness import alone, commit, machine, peak_mb

mpl.use("Agg")
plt.rcParams.update({"font.size": 9, "figure.dpi": 150})
SETTINGS = json.loads((Path(__file__).parent / "ct_measured.json").read_text())
EFFORT = ("steps", "samples", "EM steps", "iterations", "sketch")  # what a trial may have less of
OUT = Path("docs/results/ct")
SEGMENTED = 512  # pixels on a side of the challenge's segmentations
HISTOGRAM = 256  # bins, for Otsu's threshold
TV_STEPS, TV_TOLERANCE = 3000, 1e-6
LARGE = 0.9  # quantile of |error| above which a pixel of the tooth counts as wrong
TRIALS = 5  # steps of training, timed before the others are taken


@dataclass(frozen=True)
class Problem:
    """What was measured, and what the reconstruction is compared with."""

    name: str
    A: RayTransform
    y: Tensor  # (1, 1, angles, detectors)
    truth: Tensor  # the segmentation, (512, 512) boolean, or the image from all angles, (size, size)
    penalty: float  # λ

    @property
    def segmented(self) -> bool:
        """Whether the truth is a segmentation."""
        return self.truth.dtype == torch.bool

    @property
    def facts(self) -> dict:
        """How much was measured."""
        return {"angles": self.y.shape[-2], "detectors": self.y.shape[-1], "measurements": self.y.numel()}


# The measurements


def helsinki(data: Path, sample: str) -> Problem:
    """Return a sample of the challenge: some of its angles, neighbouring columns averaged, lengths in cm."""
    S = SETTINGS["helsinki"]
    every, bins = (S["every"] | S["optional"])[sample], S["bins"]
    with np.load(data / "ct" / "htc2022.npz") as raw:
        sinogram, degrees = (torch.tensor(raw[f"{sample}_{part}"])[::every] for part in ("sinogram", "angles"))
        segmentation = torch.tensor(raw[f"{sample}_segmentation"])
    y = sinogram.unflatten(1, (-1, bins)).mean(-1) / S["attenuation"]
    A = RayTransform.fan(
        SETTINGS["size"],
        degrees.double().deg2rad(),
        source_origin=41.066,
        source_detector=55.374,
        detectors=y.shape[1],
        detector_spacing=0.02 * bins,
        pixel_size=0.01483 * SEGMENTED / SETTINGS["size"],
    )
    return Problem(f"helsinki-{sample}", A, y[None, None], segmentation, S["penalty"])


def tooth(data: Path, row: int | None = None) -> Problem:
    """Return some angles of the tooth, and what filtered back-projection makes of all; lengths in ``unit`` columns."""
    S = SETTINGS["tooth"]
    with np.load(data / "ct" / "tooth.npz") as raw:
        parts = (raw[part][:, S["slice"] if row is None else row] for part in ("projections", "white", "dark"))
        p, white, dark = (torch.tensor(part, dtype=torch.float64) for part in parts)
        theta = torch.tensor(raw["theta"]).deg2rad()
    p = -((p - dark.mean(0)) / (white.mean(0) - dark.mean(0))).log() / S["attenuation"]
    y = rebinned(p, rotation_centre(p, theta), S["detectors"], S["columns"] / S["detectors"]).float()[None, None]

    def transform(angles: Tensor) -> RayTransform:
        width, N = S["columns"] / S["unit"], SETTINGS["size"]
        return RayTransform.parallel(N, angles, S["detectors"], width / S["detectors"], width / N)

    few = torch.arange(S["angles"]) * S["every"]
    return Problem("tooth", transform(theta[few]), y[:, :, few], transform(theta).fbp(y)[0, 0], S["penalty"])


def rotation_centre(p: Tensor, theta: Tensor) -> float:  # (A, D), (A,)
    """Return the column about which the centre of mass of a whole object turns: it draws c + a cos θ + b sin θ."""
    mass = p.clamp(min=0)
    centre = mass @ torch.arange(p.shape[1], dtype=p.dtype) / mass.sum(1)
    waves = torch.stack([torch.ones_like(theta), theta.cos(), theta.sin()], dim=1)
    return torch.linalg.lstsq(waves, centre.unsqueeze(1)).solution[0].item()


def rebinned(p: Tensor, centre: float, bins: int, width: float) -> Tensor:  # (A, D) -> (A, bins)
    """Return means of p over bins of some columns around the centre; columns have sharp edges, and beyond is air."""
    total = functional.pad(p.cumsum(1), (1, 0)).numpy()
    edges = centre + 0.5 + (np.arange(bins + 1) - bins / 2) * width
    columns = np.arange(total.shape[1])
    return torch.tensor(np.stack([np.diff(np.interp(edges, columns, row)) for row in total])) / width


def problem_of(data: Path, case: str) -> Problem:
    return tooth(data) if case == "tooth" else helsinki(data, case.removeprefix("helsinki-"))


# Scores


def enlarged(x: Tensor) -> Tensor:  # (size, size) -> (512, 512)
    return functional.interpolate(x[None, None], (SEGMENTED, SEGMENTED), mode="bilinear")[0, 0]


def otsu(x: Tensor) -> float:
    """Return the threshold that leaves the largest variance between its two classes (Otsu 1979)."""
    x = x.double()
    low, high = x.min().item(), x.max().item()
    counts, edges = torch.histogram(x.flatten(), HISTOGRAM, range=(low, high))
    middles = (edges[1:] + edges[:-1]) / 2
    below, sums = counts.cumsum(0)[:-1], (counts * middles).cumsum(0)
    above = counts.sum() - below
    between = below * above * (sums[:-1] / below - (sums[-1] - sums[:-1]) / above) ** 2
    return edges[1 + between.nan_to_num(nan=-math.inf).argmax()].item()


def matthews(found: Tensor, truth: Tensor) -> float:
    """Return the correlation of two masks; 0 where one of them is constant."""
    a, b = (mask.flatten().double() - mask.double().mean() for mask in (found, truth))
    scale = (a.norm() * b.norm()).item()
    return (a @ b).item() / scale if scale else 0.0


def auc(score: Tensor, positive: Tensor) -> float:
    """Return how often a positive has the larger score of a pair, ties counted half; by ranks."""
    _, which, counts = score.flatten().unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0).double() - (counts.double() - 1) / 2)[which]
    positive = positive.flatten()
    n, m = int(positive.sum()), int((~positive).sum())
    return ((ranks[positive].sum() - n * (n + 1) / 2) / (n * m)).item() if n and m else float("nan")


def correlation(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()


def slope(x: Tensor) -> Tensor:  # (H, W)
    """Return |∇x| by central differences."""
    return torch.stack(torch.gradient(x)).norm(dim=0)


def circle(size: int) -> Tensor:  # (size, size)
    """Return the inscribed circle."""
    axis = torch.arange(size) - (size - 1) / 2
    return axis[:, None] ** 2 + axis**2 <= (size / 2) ** 2


def psnr(x: Tensor, truth: Tensor) -> float:
    inside = circle(len(truth))
    return (10 * torch.log10(truth.max() ** 2 / (x - truth)[inside].square().mean())).item()


def score_of(x: Tensor, truth: Tensor) -> float:  # (size, size)
    """Return the challenge's score of an image, or its peak signal to noise ratio."""
    if truth.dtype != torch.bool:
        return psnr(x, truth)
    large = enlarged(x)
    return matthews(large > otsu(large), truth)


def warnings_of(mean: Tensor, std: Tensor, truth: Tensor) -> dict[str, float]:
    """Return how well the error bars, and plainer things beside them, tell where the reconstruction is wrong."""
    if truth.dtype == torch.bool:
        large, bars, edges = enlarged(mean), enlarged(std), enlarged(slope(mean))
        threshold = otsu(large)
        margin, wrong = (large - threshold).abs(), (large > threshold) != truth
        more = {"wrong": wrong.double().mean().item(), "AUC nearness to threshold": auc(-margin, wrong)}
        more["AUC margin in std"] = auc(-margin / bars.clamp(min=torch.finfo(bars.dtype).tiny), wrong)
    else:
        inside = circle(len(truth))
        error, bars, edges = (mean - truth).abs()[inside], std[inside], slope(mean)[inside]
        wrong = error > error.quantile(LARGE)
        more = {"correlation std": correlation(bars, error), "correlation gradient": correlation(edges, error)}
        more["rms error / rms std"] = (error.square().mean() / bars.square().mean()).sqrt().item()
    return {"AUC std": auc(bars, wrong), "AUC gradient": auc(edges, wrong)} | more


# Reconstructions


def by_total_variation(p: Problem, penalty: float) -> Tensor:  # (size, size)
    return total_variation_reconstruction(p.A, p.y, penalty, True, TV_TOLERANCE, TV_STEPS).image[0, 0]


def trained(p: Problem, steps: int, cache: Path) -> tuple[DeepImagePrior, float]:
    """Return the network that minimises TV's objective, trained now or before, and how many seconds that took."""
    path, z = cache / f"{p.name}-{steps}.pt", p.A.fbp(p.y)
    torch.manual_seed(SETTINGS["seed"])
    net = UNet()
    if not path.exists():
        start = time.perf_counter()
        dip = train(p.A, p.y, net, z, 2 * p.penalty / p.y.numel(), steps, SETTINGS["rate"])
        kept = {"net": dip.net.state_dict(), "losses": dip.losses, "step": dip.step}
        torch.save(kept | {"seconds": time.perf_counter() - start}, path)
    kept = torch.load(path, weights_only=True)
    net.load_state_dict(kept["net"])
    return DeepImagePrior(net.eval().requires_grad_(False), z, kept["losses"], kept["step"]), kept["seconds"]


def error_bars(p: Problem, dip: DeepImagePrior, effort: dict, state: Path) -> Reconstruction:
    """Return the Gaussian model by samples, matrix-free, its hyperparameters by EM that goes on where it stopped."""
    S = SETTINGS | effort
    rec = linearized(
        dip, p.A, p.y, prior="layerwise", tune=None, method="sampled", num_samples=S["samples"], seed=S["seed"],
        sketch=S["sketch"], max_iterations=S["iterations"],
    )  # fmt: skip
    rec.posterior.tune(steps=S["EM steps"], search={"steps": S["Newton steps"]}, checkpoint=state)
    return rec


def refined(rec: Reconstruction) -> Tensor:  # (size, size)
    """Return the mean of the linear model, as near as a few Newton steps come."""
    return rec.refine(steps=SETTINGS["Newton steps"]).mean[0]


def told_before(p: Problem, effort: dict) -> str:
    """Return how long a case will take, from a few steps and one product with Jᵀ Aᵀ A J for all samples at once."""
    S = SETTINGS | effort
    dip = train(p.A, p.y, UNet(), p.A.fbp(p.y), steps=1, progress=False)  # the first step has things to load
    start = time.perf_counter()
    train(p.A, p.y, dip.net.requires_grad_(True), dip.z, steps=TRIALS, progress=False)
    step = (time.perf_counter() - start) / TRIALS
    vectors = S["samples"] + 1
    lin = linearized(
        dip, p.A, p.y, prior="layerwise", tune=None, method="sampled", num_samples=1, sketch=1, max_iterations=1
    ).posterior.lin
    start = time.perf_counter()
    lin.vjp(dip.z, lin.jvp(dip.z, torch.randn(vectors, lin.num_params)))
    product = time.perf_counter() - start
    em = product * (S["iterations"] + S["sketch"] / vectors)
    return (
        f"{p.name}: {step:.3f} s a training step, {product:.2f} s a product, so up to {em:.0f} s an EM step; "
        f"about {(S['steps'] * step + (S['EM steps'] + 1) * em) / 60:.0f} minutes at most"
    )


def one(data: Path, case: str, effort: dict, cache: Path, out: Path, threads: int) -> dict:
    """Reconstruct one case in all ways, and draw it."""
    torch.set_num_threads(threads)
    p, steps = problem_of(data, case), effort["steps"]
    start = time.perf_counter()
    images = {"FBP": p.A.fbp(p.y)[0, 0], "TV": by_total_variation(p, p.penalty)}
    seconds = {"TV": time.perf_counter() - start}
    if not (cache / f"{p.name}-{steps}.pt").exists():
        print(told_before(p, effort), flush=True)
    dip, seconds["DIP"] = trained(p, steps, cache)
    start = time.perf_counter()
    rec = error_bars(p, dip, effort, cache / f"{p.name}-{steps}-em.safetensors")
    std = rec.std[0]
    seconds["EM"] = time.perf_counter() - start
    images["DIP"], images["DIP, refined"] = dip.image[0, 0], refined(rec)
    draw(p, images, std, out / f"{case}.png")
    misfit = {name: (p.A(x[None, None]) - p.y).square().mean().sqrt().item() for name, x in images.items()}
    return (
        p.facts
        | effort
        | {
            "case": case,
            "penalty": p.penalty,
            "seed": SETTINGS["seed"],
            "score": {name: score_of(x, p.truth) for name, x in images.items()},
            "misfit": misfit,
            "warnings": warnings_of(images["DIP"], std, p.truth),
            "warnings, refined": warnings_of(images["DIP, refined"], std, p.truth),
            "noise": rec.posterior.likelihood.noise.item() ** 0.5,
            "EM": [{key: told[key] for key in ("residual", "iterations", "moved")} for told in rec.posterior.history],
            "seconds": seconds,
            "peak": peak_mb(),
        }
    )


# Figures


def draw(p: Problem, images: dict[str, Tensor], std: Tensor, path: Path) -> None:
    """Draw what is true, three reconstructions, the error bars and the errors."""
    mean = images["DIP"]
    figure, axes = plt.subplots(2, 3, figsize=(8.4, 5.2), layout="constrained")
    first = "segmentation" if p.segmented else "FBP of all angles"
    unit = "MCC {:.3f}" if p.segmented else "{:.1f} dB"
    top = 1.0 if p.segmented else p.truth.max().item()
    panels: list[tuple[str, Tensor, dict]] = [(first, p.truth.float(), {"vmin": 0, "vmax": top, "cmap": "gray"})]
    for name in ("FBP", "TV", "DIP"):
        told = unit.format(score_of(images[name], p.truth))
        panels.append((f"{name}, {told}", images[name], {"vmin": 0, "vmax": top, "cmap": "gray"}))
    panels.append(("standard deviation", std, {"vmin": 0, "cmap": "viridis"}))
    if p.segmented:
        large = enlarged(mean)
        found = (large > otsu(large)).float()
        panels.append(
            ("wrong: too much, too little", found - p.truth.float(), {"vmin": -1, "vmax": 1, "cmap": "coolwarm"})
        )
    else:
        panels.append(("|error| of DIP", (mean - p.truth).abs(), {"vmin": 0, "cmap": "viridis"}))
    for ax, (title, image, look) in zip(axes.flat, panels, strict=True):
        shown = ax.imshow(image.numpy(), interpolation="nearest", **look)
        ax.set(title=title, xticks=(), yticks=())
        figure.colorbar(shown, ax=ax, shrink=0.85)
    figure.savefig(path)
    plt.close(figure)


# What is chosen before, and what is told after


def choose(data: Path) -> str:
    """Return scores of total variation where nothing else is scored, penalty by penalty."""
    rows = [helsinki(data, sample) for sample in SETTINGS["helsinki"]["optional"]]
    other = tooth(data, 1 - SETTINGS["tooth"]["slice"])
    lines = ["| penalty | " + " | ".join(p.name for p in rows) + " | mean | tooth, other slice |", "|---" * 6 + "|"]
    for penalty in SETTINGS["penalties"]:
        scores = [score_of(by_total_variation(p, penalty), p.truth) for p in rows]
        level = score_of(by_total_variation(other, penalty), other.truth)
        cells = [f"{score:.4f}" for score in (*scores, sum(scores) / len(scores))]
        lines.append(f"| {penalty:g} | " + " | ".join(cells) + f" | {level:.2f} dB |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def report(out: Path) -> str:
    """Return the tables, and keep them."""
    paths = [*sorted(out.glob("helsinki-*.json")), *out.glob("tooth.json")]
    runs = [json.loads(path.read_text()) for path in paths]
    lines = ["# Real measurements", "", "`make reproduce-ct-measured`; settings in ct_measured.json.", ""]
    for title, some, form in (
        ("Helsinki challenge, Matthews correlation", [run for run in runs if run["case"] != "tooth"], ".3f"),
        ("Tooth, PSNR in dB against all angles", [run for run in runs if run["case"] == "tooth"], ".2f"),
    ):
        if some:
            lines += [f"## {title}", "", *_table(some, "score", form), ""]
            lines += ["Where it is wrong, by the network's image and standard deviation:", ""]
            lines += [*_table(some, "warnings", ".3f"), ""]
            lines += [*_told(some), "", *(f"![{run['case']}]({run['case']}.png)" for run in some), ""]
    text = "\n".join(lines)
    (out / "measured.md").write_text(text)
    return text


def _table(runs: list[dict], part: str, form: str) -> list[str]:
    names = list(runs[0][part])
    head = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    return head + [f"| {run['case']} | " + " | ".join(f"{run[part][n]:{form}}" for n in names) + " |" for run in runs]


def _told(runs: list[dict]) -> list[str]:
    return [
        f"- {run['case']}: {run['angles']} angles of {run['detectors']} detectors, {run['steps']} steps; TV "
        f"{run['seconds']['TV']:.0f} s, DIP {run['seconds']['DIP']:.0f} s, EM {run['seconds']['EM']:.0f} s with "
        f"residuals of {run['EM'][-1]['residual']:.2g} at last, {run['peak']:.0f} MB; commit {run['commit']}, seed "
        f"{run['seed']}, {run['machine']}."
        for run in runs
    ]


def main() -> None:
    cases = [f"helsinki-{sample}" for sample in SETTINGS["helsinki"]["every"]] + ["tooth"]
    optional = [f"helsinki-{sample}" for sample in SETTINGS["helsinki"]["optional"]]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", choices=cases + optional, nargs="+", default=cases)
    for name in EFFORT:
        parser.add_argument(f"--{name.replace(' ', '-')}", dest=name, type=int, default=SETTINGS[name])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--cache", type=Path, default=Path("build/ct"))
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    effort = {name: getattr(args, name) for name in EFFORT}
    if args.out == OUT and any(effort[name] != SETTINGS[name] for name in EFFORT):
        parser.error(f"a trial with other {', '.join(EFFORT)} needs an --out of its own")
    torch.set_num_threads(args.threads)
    if args.choose:
        print(choose(args.data))
        return
    origin = commit()  # of the code that runs, whatever is committed meanwhile
    for folder in (args.out, args.cache):
        folder.mkdir(parents=True, exist_ok=True)
    for case in () if args.report else args.only:
        path = args.out / f"{case}.json"
        if not path.exists():
            found = alone(one, args.data, case, effort, args.cache, args.out, args.threads)
            path.write_text(json.dumps(found | {"commit": origin, "machine": machine()}, indent=1) + "\n")
            print(case, found["score"], found["warnings"], found["seconds"], found["peak"], flush=True)
    print(report(args.out))


if __name__ == "__main__":
    main()
