"""Reconstruction of KMNIST images from few projections, with error bars, beside classical methods and MC dropout.

    python benchmarks/reproduce/ct.py --data DIR [--angles 10,20] [--noise 0.05] [--report]

Which images, seeds and settings stands in ct.json; steps of training were chosen on images 100 to 102. One JSON for an
image is kept under ``--out``, and what is there is not run again. Test log likelihoods are per pixel, over patches;
every covariance has a floor added: σ² d_y / ‖A‖², white noise of the image that would look like the measurement's, or a
multiple of it; each method is compared with the multiple that is best for it on the images "held out".

The protocol has a history. One floor for all came first; that each method has its own, of three, was decided after
images 0 to 9 had been scored, and images 10 to 19 ("blind") were run after that: evidence led MC dropout by 1.7 and 4.4
standard errors at 10 and 20 angles. Two of those three floors did not know how bright an image is, where the third did;
so multiples of one floor took their place, with six images held out, and the refined posterior is scored beside the one
around the network. Images 20 to 29 ("fresh") were run after all this was committed. What is compared with MC dropout
there is evidence around the network or refined, whichever is better on the images held out.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ntkgp.inverse import (
    DeepImagePrior,
    GaussianImage,
    RayTransform,
    UNet,
    UnitNoise,
    linearized,
    mc_dropout,
    tikhonov,
    total_variation_reconstruction,
    train,
)
from ntkgp.inverse.reconstruction import Reconstruction
from ntkgp.report.metrics import psnr

sys.path.insert(0, str(Path(__file__).parent.parent))
from harness import alone, commit, machine, peak_mb

SETTINGS = json.loads((Path(__file__).parent / "ct.json").read_text())
PENALTIES = (0.01, 0.03, 0.1, 0.3)  # of TV and Tikhonov; the best for the true image, which flatters them
DROPOUT_SAMPLES = 200
REPEATS = 5
OUT = Path("docs/results/ct")
OURS = {
    "evidence": {"tune": "evidence"},
    "TV-PredCP": {"tune": "predcp"},
    "evidence, layerwise": {"prior": "layerwise"},
    "sampled EM, layerwise": {"prior": "layerwise", "method": "sampled", "num_samples": 64, "tuning_steps": 10},
}
REFINED = "evidence, refined"
COMPARED = ("unit noise", "MC dropout", "evidence", REFINED, "TV-PredCP")  # with every floor, on every image
PAIR = ("evidence, layerwise", "sampled EM, layerwise")  # with each other, on the first ten images and the next
METHODS = (*COMPARED, *PAIR)
TITLES = {
    "images": "the first ten",
    "blind": "run under the protocol before this",
    "fresh": "run after all was fixed",
    "held out": "on which floors were chosen",
    "all but held out": "all of these",
}
HISTORY = (  # figures that the script printed at that commit
    "Log likelihoods need a floor under the covariances, and the way to choose it has a history. One floor for all "
    "came first; then each method had its own of three, chosen on three images, where evidence led MC dropout by "
    "14.6 and 4.9 standard errors on the first ten images (10 and 20 angles) and by 1.7 and 4.4 on the next ten "
    "(commit 482a9dc). Two of those three did not know how bright an image is. Here each method has its own "
    "multiple of one floor that does, chosen on six images; that, and that evidence around the network or refined "
    "is compared, whichever is better on those six, was committed before the last ten images were run."
)
FLOORS = {f"{m:g}x": m for m in SETTINGS["multiples"]}  # of σ² d_y / ‖A‖²


def image_noise(A: RayTransform, noise: float) -> float:
    """Return σ² d_y / ‖A‖² in Frobenius' norm."""
    return noise * A.measured_shape.numel() / A.matrix.values.square().sum().item()


def scores(image: GaussianImage, x: Tensor, floor: float) -> dict[str, float]:
    """Return the log likelihood per pixel of the true image, with multiples of the floor."""
    return {name: image.log_likelihood(x[0], SETTINGS["patch"], m * floor) for name, m in FLOORS.items()}


def asked(index: int) -> tuple[str, ...]:
    """Return the methods for an image."""
    return METHODS if index in SETTINGS["images"] + SETTINGS["blind"] else COMPARED


def measured(
    data: Path, index: int, angles: int, noise: float = SETTINGS["noise"]
) -> tuple[Tensor, RayTransform, Tensor, float]:
    """Return an image, how it is measured, its measurement, and the noise's standard deviation."""
    images = np.load(data / "images" / "kmnist_test.npz")["x_test"]
    x = torch.tensor(images[index : index + 1]).float().unsqueeze(1) / 255
    A = RayTransform.parallel(28, angles, SETTINGS["detectors"])
    clean = A(x)
    sigma = noise * clean.abs().mean().item()
    generator = torch.Generator().manual_seed(1000 * SETTINGS["seed"] + index)
    return x, A, clean + sigma * torch.randn(clean.shape, generator=generator), sigma


def penalty_of(angles: int, noise: float = SETTINGS["noise"]) -> float:
    """Return γ for so many angles and so much noise, of the mean of |A x|.

    Raises:
        ValueError: if there is none in ct.json.
    """
    known = SETTINGS["penalty"].get(str(noise), {})
    if str(angles) not in known:
        told = {n: list(by) for n, by in SETTINGS["penalty"].items()}
        raise ValueError(f"ct.json has penalties for noise and angles {told}, but not for {noise} and {angles}")
    return known[str(angles)]


def prior_of(A: RayTransform, y: Tensor, penalty: float) -> DeepImagePrior:
    """Return the trained network."""
    torch.manual_seed(SETTINGS["seed"])
    return train(A, y, UNet(), A.fbp(y), penalty, SETTINGS["steps"], SETTINGS["rate"], progress=False)


def lacking(found: dict, methods: Sequence[str]) -> list[str]:
    """Return which methods have no score with a floor that they need."""
    needed = {m: {"1x"} if m in PAIR else FLOORS.keys() for m in methods}
    return [m for m in methods if not found.get("log likelihood", {}).get(m, {}).keys() >= needed[m]]


def one(data: Path, index: int, angles: int, noise: float, methods: Sequence[str], found: dict) -> dict:
    """Reconstruct one image in those ways that are asked for and not yet found."""
    start, todo = time.perf_counter(), lacking(found, methods)
    (x, A, y, sigma), penalty = measured(data, index, angles, noise), penalty_of(angles, noise)
    floor, dip = image_noise(A, sigma**2), prior_of(A, y, penalty)
    found = {"psnr": {}, "seconds": {}, "noise": {}, "log likelihood": {}} | found
    found |= {"index": index, "angles": angles, "floor": floor}
    found["psnr"] |= {
        "FBP": psnr(A.fbp(y), x),
        "Tikhonov": max(psnr(tikhonov(A, y, p).image, x) for p in PENALTIES),
        "TV": max(psnr(total_variation_reconstruction(A, y, p).image, x) for p in PENALTIES),
        "DIP": psnr(dip.image, x),
    }
    found["seconds"]["DIP"] = time.perf_counter() - start
    found["noise"]["true"] = sigma**2
    found["log likelihood"]["unit noise"] = scores(UnitNoise(dip), x, floor)
    if "MC dropout" in todo:
        dropped_out(found, A, y, x, floor, penalty)
    for name, options in OURS.items():
        if name in todo or (name == "evidence" and REFINED in todo):
            scored(found, name, dip, A, y, x, floor, {"penalty": penalty} | options)
    return found | {"peak": peak_mb()}


def dropped_out(found: dict, A: RayTransform, y: Tensor, x: Tensor, floor: float, penalty: float) -> None:
    S, start = SETTINGS, time.perf_counter()
    torch.manual_seed(S["seed"])
    net, searched = UNet(dropout=S["dropout"]), {"steps": S["dropout steps"], "rate": S["rate"], "penalty": penalty}
    draws = mc_dropout(A, y, net, A.fbp(y), DROPOUT_SAMPLES, S["seed"], progress=False, **searched)
    found["seconds"]["MC dropout"] = time.perf_counter() - start
    found["psnr"]["MC dropout"] = psnr(draws.mean, x[0])
    found["log likelihood"]["MC dropout"] = scores(draws, x, floor)


def scored(
    found: dict, name: str, dip: DeepImagePrior, A: RayTransform, y: Tensor, x: Tensor, floor: float, options: dict
) -> None:
    start = time.perf_counter()
    rec = linearized(dip, A, y, **options)
    found["seconds"][name] = time.perf_counter() - start
    found["log likelihood"][name] = scores(rec, x, floor)
    found["noise"][name] = rec.posterior.likelihood.noise.item()
    if name == "evidence":
        refined = rec.refine()
        found["psnr"]["DIP, refined"] = psnr(refined.mean.float(), x[0])
        found["log likelihood"][REFINED] = scores(refined, x, floor)
        found["evidence steps"] = len(rec.posterior.history)
        found["exact"] = {"peak": peak_mb(), "step": seconds_a_step(rec)}


def seconds_a_step(rec: Reconstruction) -> float:
    """Return how long the evidence and its gradient take, the Gram matrices being there."""
    start = time.perf_counter()
    for _ in range(REPEATS):
        with torch.no_grad():
            rec.posterior.prior.raw_variance += 1e-9  # nothing is to be kept from the step before
        rec.log_evidence().backward()
    return (time.perf_counter() - start) / REPEATS


def exact(data: Path, threads: int) -> dict:
    """Return what the exact evidence of the first image takes, in a process that does nothing else."""
    torch.set_num_threads(threads)
    angles = SETTINGS["exact angles"]
    (_, A, y, _), penalty = measured(data, SETTINGS["images"][0], angles), penalty_of(angles)
    dip, start = prior_of(A, y, penalty), time.perf_counter()
    rec = linearized(dip, A, y, tune="evidence", penalty=penalty)
    seconds = time.perf_counter() - start
    steps = len(rec.posterior.history)
    return {"angles": angles, "seconds": seconds, "steps": steps, "step": seconds_a_step(rec), "peak": peak_mb()}


def report(out: Path) -> str:
    runs = [json.loads(path.read_text()) for path in sorted(out.glob("kmnist-*.json"))]
    lines = ["# KMNIST from few projections", "", "`make reproduce-ct`; settings in ct.json.", "", HISTORY, ""]
    for angles in sorted({run["angles"] for run in runs}):
        sets = {
            name: [run for run in runs if run["angles"] == angles and run["index"] in SETTINGS[name]]
            for name in ("images", "blind", "fresh", "held out")
        }
        best = own_floors(held_out := sets.pop("held out"))
        for name, group in {**sets, "held out": held_out, "all but held out": [*chain(*sets.values())]}.items():
            if group:
                lines += [f"## {angles} angles, {len(group)} images, {TITLES[name]}", "", *_part(group, best)]
    if (file := out / "exact.json").exists():
        run = json.loads(file.read_text())
        lines += [
            f"Exact evidence at {run['angles']} angles in a process of its own: peak {run['peak'] / 1e3:.2f} GB, "
            f"{run['step']:.2f} s a step, {run['seconds']:.0f} s for {run['steps']} steps and all before them; "
            f"{run['machine']}, commit {run['commit']}.",
            "",
        ]
    text = "\n".join(lines)
    (out / "kmnist.md").write_text(text)
    return text


def own_floors(held_out: list[dict]) -> dict[str, str]:
    """Return, for every method, the floor that suits it best on images that are not scored."""
    found = [m for m in COMPARED if held_out and not any(lacking(run, [m]) for run in held_out)]
    return {m: max(FLOORS, key=lambda f: _values(held_out, m, f).mean().item()) for m in found}


def _values(runs: list[dict], method: str, floor: str) -> Tensor:
    return torch.tensor([run["log likelihood"][method][floor] for run in runs]).double()


def _part(runs: list[dict], best: dict[str, str]) -> list[str]:
    names = [name for name in runs[0]["psnr"] if all(name in run["psnr"] for run in runs)]
    cells = [_mean([run["psnr"][name] for run in runs], ".2f") for name in names]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += ["| PSNR, dB | " + " | ".join(cells) + " |", ""]
    floor = sum(run["floor"] for run in runs) / len(runs)
    lines += [
        f"| log likelihood per pixel | floor σ² d_y / ‖A‖², {floor:.2g} | less MC dropout's | standard errors "
        "| best multiple, held out | with that | less MC dropout's | standard errors | seconds |",
        "|---" * 9 + "|",
    ]
    for name in [m for m in METHODS if all("1x" in run["log likelihood"].get(m, {}) for run in runs)]:
        cells = _against(runs, name, "1x", "1x")
        if name in best and not any(lacking(run, [name, "MC dropout"]) for run in runs):
            cells += [best[name], *_against(runs, name, best[name], best["MC dropout"])]
        else:
            cells += [""] * 4
        seconds = [run["seconds"][name] for run in runs if name in run["seconds"]]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {sum(seconds) / max(len(seconds), 1):.0f} |")
    lines.append("")
    compared = [run for run in runs if "sampled EM, layerwise" in run["log likelihood"]]
    if compared:
        gap = _values(compared, "sampled EM, layerwise", "1x") - _values(compared, "evidence, layerwise", "1x")
        lines.append(
            f"- Sampled EM less exact evidence, the same prior: {_mean(gap, '+.4f')} over {len(gap)} images, "
            f"at most {gap.abs().max():.4f}."
        )
    took = {key: max(run["exact"][key] for run in runs) for key in ("peak", "step")}
    commits = sorted({c for run in runs for c in run["commit"].split(", ")})
    return [
        *lines,
        f"- Exact evidence beside all else: peak {took['peak'] / 1e3:.2f} GB, {took['step']:.2f} s a step, at most.",
        f"- {runs[0]['machine']}, commits {', '.join(commits)}.",
        "",
    ]


def _against(runs: list[dict], name: str, floor: str, dropout_floor: str) -> list[str]:
    here = _values(runs, name, floor)
    gap = here - _values(runs, "MC dropout", dropout_floor)
    return [_mean(here, ".3f"), _mean(gap, "+.3f"), f"{_errors(gap):.1f}" if gap.any() else ""]


def _errors(values: Tensor) -> float:
    return (values.mean() / (values.std() / len(values) ** 0.5)).item() if len(values) > 1 else float("nan")


def _mean(values: Tensor | list[float], form: str) -> str:
    v = torch.as_tensor(values)
    return f"{v.mean():{form}}" + (f" ± {v.std() / len(v) ** 0.5:{form.lstrip('+')}}" if len(v) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--angles", default="10,20")
    parser.add_argument("--noise", type=float, default=SETTINGS["noise"], help="of the mean of |A x|")
    parser.add_argument("--images", type=int, nargs="*", help="by default those of ct.json")
    parser.add_argument("--methods", nargs="*", choices=METHODS, help="by default those that an image is for")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    if args.out == OUT and args.noise != SETTINGS["noise"]:
        parser.error("other noise needs an --out of its own")
    torch.set_num_threads(args.threads)
    origin = commit()  # of the code that runs, whatever is committed meanwhile
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.report:
        for index in args.images or [i for name in TITLES if name in SETTINGS for i in SETTINGS[name]]:
            for angles in map(int, args.angles.split(",")):
                path = args.out / f"kmnist-{angles}-{index}.json"
                found = json.loads(path.read_text()) if path.exists() else {}
                methods = args.methods or asked(index)
                if lacking(found, methods):
                    commits = [c for c in found.get("commit", "").split(", ") if c] + [origin]
                    found = one(args.data, index, angles, args.noise, methods, found)
                    found |= {"commit": ", ".join(dict.fromkeys(commits)), "machine": machine()}
                    path.write_text(json.dumps(found, indent=1) + "\n")
                    print(path.stem, found["psnr"], found["log likelihood"], found["seconds"], flush=True)
        if not (file := args.out / "exact.json").exists():
            found = alone(exact, args.data, args.threads) | {"commit": origin, "machine": machine()}
            file.write_text(json.dumps(found, indent=1) + "\n")
    print(report(args.out))


if __name__ == "__main__":
    main()
