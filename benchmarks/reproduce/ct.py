"""Reconstruction of KMNIST images from few projections, with error bars, beside classical methods and MC dropout.

    python benchmarks/reproduce/ct.py --data DIR [--angles 10,20] [--report]

Which images, seeds and settings stands in ct.json, written before anything was scored. One JSON for an image is kept
under ``--out``, and what is there is not run again. Test log likelihoods are per pixel, over patches; every method's
covariance has the same σ² d_y / ‖A‖² added, white noise of the image that would look like the measurement's.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ntkgp.inverse import RayTransform, UNet, linearized, tikhonov, total_variation_reconstruction, train
from ntkgp.inverse.deep_image_prior import DeepImagePrior
from ntkgp.inverse.reconstruction import Reconstruction

sys.path.insert(0, str(Path(__file__).parent.parent))
from harness import commit, machine, peak_mb

SETTINGS = json.loads((Path(__file__).parent / "ct.json").read_text())
PENALTIES = (0.01, 0.03, 0.1, 0.3)  # of TV and Tikhonov; the best for the true image, which flatters them
DROPOUT_SAMPLES = 200
REPEATS = 5
METHODS = ("unit noise", "MC dropout", "evidence", "TV-PredCP", "evidence, layerwise", "sampled EM, layerwise")


def psnr(x: Tensor, truth: Tensor) -> float:
    return (10 * torch.log10(truth.max() ** 2 / (x - truth).square().mean())).item()


def patches(size: int, patch: int) -> list[Tensor]:
    numbers = torch.arange(size * size).view(size, size)
    return [part.flatten() for rows in numbers.split(patch) for part in rows.split(patch, dim=1)]


def gaussian_score(mean: Tensor, Sigma: Tensor, x: Tensor, patch: int) -> float:
    """Return the log density of x per pixel, with independent patches."""
    total, left = 0.0, (x.flatten() - mean).double()
    for which in patches(x.shape[-1], patch):
        normal = torch.distributions.MultivariateNormal(left[which] * 0, Sigma.double()[which][:, which])
        total += normal.log_prob(left[which]).item()
    return total / left.numel()


def image_noise(A: RayTransform, noise: float) -> float:
    """Return σ² d_y / ‖A‖² in Frobenius' norm."""
    return noise * A.measured_shape.numel() / A.matrix.values.square().sum().item()


def dropout_samples(A: RayTransform, y: Tensor, penalty: float) -> Tensor:  # (S, d_x)
    torch.manual_seed(SETTINGS["seed"])
    net = UNet(dropout=SETTINGS["dropout"])
    dip = train(A, y, net, A.fbp(y), penalty, SETTINGS["steps"], SETTINGS["rate"])
    dip.net.train()
    with torch.no_grad():
        return torch.cat([dip.net(dip.z) for _ in range(DROPOUT_SAMPLES)]).flatten(1)


def one(data: Path, index: int, angles: int) -> dict:
    """Reconstruct one image in all ways."""
    S, start = SETTINGS, time.perf_counter()
    images = np.load(data / "images" / "kmnist_test.npz")["x_test"]
    x = torch.tensor(images[index : index + 1]).float().unsqueeze(1) / 255
    A, penalty = RayTransform.parallel(28, angles, S["detectors"]), S["penalty"][str(angles)]
    clean = A(x)
    sigma = S["noise"] * clean.abs().mean()
    generator = torch.Generator().manual_seed(1000 * S["seed"] + index)
    y = clean + sigma * torch.randn(clean.shape, generator=generator)
    floor, d_x = image_noise(A, sigma.item() ** 2), x.numel()
    torch.manual_seed(S["seed"])
    dip = train(A, y, UNet(), A.fbp(y), penalty, S["steps"], S["rate"])
    found: dict = {
        "index": index,
        "angles": angles,
        "floor": floor,
        "psnr": {
            "FBP": psnr(A.fbp(y), x),
            "Tikhonov": max(psnr(tikhonov(A, y, p).image, x) for p in PENALTIES),
            "TV": max(psnr(total_variation_reconstruction(A, y, p).image, x) for p in PENALTIES),
            "DIP": psnr(dip.image, x),
        },
        "seconds": {"DIP": time.perf_counter() - start},
        "noise": {"true": sigma.item() ** 2},
    }
    draws = dropout_samples(A, y, penalty)
    centred = (draws - draws.mean(0)).double()
    found["psnr"]["MC dropout"] = psnr(draws.mean(0).view_as(x), x)
    eye = torch.eye(d_x, dtype=torch.float64)
    mean, patch = dip.image.flatten(), S["patch"]
    found["log likelihood"] = {
        "unit noise": gaussian_score(mean, eye, x, patch),
        "MC dropout": gaussian_score(draws.mean(0), centred.mT @ centred / len(draws) + floor * eye, x, patch),
    }
    for name, options in {
        "evidence": {"tune": "evidence"},
        "TV-PredCP": {"tune": "predcp"},
        "evidence, layerwise": {"prior": "layerwise"},
        "sampled EM, layerwise": {"prior": "layerwise", "method": "sampled", "num_samples": 64, "tuning_steps": 10},
    }.items():
        scored(found, name, dip, A, y, x, floor, {"penalty": penalty} | options)
    return found | {"peak": peak_mb()}


def scored(
    found: dict, name: str, dip: DeepImagePrior, A: RayTransform, y: Tensor, x: Tensor, floor: float, options: dict
) -> None:
    start = time.perf_counter()
    rec = linearized(dip, A, y, **options)
    found["seconds"][name] = time.perf_counter() - start
    found["log likelihood"][name] = rec.log_likelihood(x[0], SETTINGS["patch"], floor)
    found["noise"][name] = rec.posterior.likelihood.noise.item()
    if name == "evidence":
        found["psnr"]["DIP, refined"] = psnr(rec.refine().mean.float(), x[0])
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


def report(out: Path) -> str:
    lines = ["# KMNIST from few projections", "", f"`make reproduce-ct`; settings in ct.json. {machine()}.", ""]
    runs = [json.loads(path.read_text()) for path in sorted(out.glob("kmnist-*.json"))]
    for angles in sorted({run["angles"] for run in runs}):
        some = [run for run in runs if run["angles"] == angles]
        names = list(some[0]["psnr"])
        lines += [
            f"## {angles} angles, {len(some)} images",
            "",
            "| | " + " | ".join(names) + " |",
            "|---" * (len(names) + 1) + "|",
        ]
        cells = [_mean([run["psnr"][name] for run in some], ".2f") for name in names]
        lines += ["| PSNR, dB | " + " | ".join(cells) + " |", ""]
        lines += ["| log likelihood per pixel | | less MC dropout's, paired | seconds |", "|---|---|---|---|"]
        for name in METHODS:
            values = torch.tensor([run["log likelihood"][name] for run in some])
            gap = values - torch.tensor([run["log likelihood"]["MC dropout"] for run in some])
            seconds = sum(run["seconds"].get(name, 0.0) for run in some) / len(some)
            lines.append(f"| {name} | {_mean(values, '.3f')} | {_mean(gap, '.3f')} | {seconds:.0f} |")
        lines.append("")
    text = "\n".join(lines)
    (out / "README.md").write_text(text)
    return text


def _mean(values: Tensor | list[float], form: str) -> str:
    v = torch.as_tensor(values)
    return f"{v.mean():{form}}" + (f" ± {v.std() / len(v) ** 0.5:{form}}" if len(v) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--angles", default="10,20")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("docs/results/ct"))
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    origin = commit()  # of the code that runs, whatever is committed meanwhile
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.report:
        for index in SETTINGS["images"]:
            for angles in map(int, args.angles.split(",")):
                path = args.out / f"kmnist-{angles}-{index}.json"
                if not path.exists():
                    found = one(args.data, index, angles) | {"commit": origin, "machine": machine()}
                    path.write_text(json.dumps(found, indent=1) + "\n")
                    print(
                        path.stem, found["psnr"], found["log likelihood"], found["seconds"], found["peak"], flush=True
                    )
    print(report(args.out))


if __name__ == "__main__":
    main()
