"""The head of Shepp and Logan at 128², matrix-free: error bars without a Jacobian, and what CG's helpers are worth.

    python benchmarks/reproduce/ct_large.py [--only 60,200,solvers] [--report]

Settings stand in ct.json. Networks are kept under ``--cache``, one JSON and one figure for a case under ``--out``, and
what is there is not run again.
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor

from ntkgp.inverse import RayTransform, UNet, linearized, phantoms, total_variation_reconstruction, train
from ntkgp.inverse.deep_image_prior import DeepImagePrior
from ntkgp.inverse.reconstruction import Reconstruction
from ntkgp.priors import Grouped
from ntkgp.report.figures import reconstruction_figure
from ntkgp.report.metrics import psnr

sys.path.insert(0, str(Path(__file__).parent.parent))
from ct import image_noise
from harness import commit, machine, peak_mb

mpl.use("Agg")
SETTINGS = json.loads((Path(__file__).parent / "ct.json").read_text())["large"]
PENALTIES = (0.3, 1.0, 2.0, 3.0)  # of TV; the best for the true image, which flatters it
CAP = 200  # iterations at which a solver gives up
SOLVERS = {  # what the samples of the tuned model are solved with
    "prior alone, cold": {"preconditioner": 0},
    "sketch of rank 100, cold": {"sketch": 100},
    "sketch of rank 500, cold": {"sketch": 500},
}


def measured(angles: int) -> tuple[Tensor, RayTransform, Tensor]:
    x = phantoms.shepp_logan(SETTINGS["size"]).unsqueeze(0)
    A = RayTransform.parallel(SETTINGS["size"], angles)
    clean, generator = A(x), torch.Generator().manual_seed(SETTINGS["seed"])
    return x, A, clean + SETTINGS["noise"] * clean.abs().mean() * torch.randn(clean.shape, generator=generator)


def trained(A: RayTransform, y: Tensor, cache: Path) -> tuple[DeepImagePrior, float]:
    """Return the network, from the cache if it is there, and how long its training took."""
    torch.manual_seed(SETTINGS["seed"])
    net, angles = UNet(), len(A.geometry.angles)
    file = cache / f"shepp-logan-{angles}.pt"
    if not file.exists():
        start = time.perf_counter()
        dip = train(A, y, net, A.fbp(y), SETTINGS["penalty"], SETTINGS["steps"], SETTINGS["rate"], progress=False)
        cache.mkdir(parents=True, exist_ok=True)
        found = {"net": dip.net.state_dict(), "losses": dip.losses, "step": dip.step}
        torch.save(found | {"seconds": time.perf_counter() - start}, file)
    found = torch.load(file, weights_only=True)
    net.load_state_dict(found["net"])
    return DeepImagePrior(net.eval().requires_grad_(False), A.fbp(y), found["losses"], found["step"]), found["seconds"]


def options() -> dict:
    return {
        "method": "sampled",
        "prior": "layerwise",
        "num_samples": SETTINGS["samples"],
        "tolerance": SETTINGS["tolerance"],
        "max_iterations": SETTINGS["iterations"],
    }


def one(angles: int, args: argparse.Namespace) -> dict:
    """Reconstruct the head from some angles, with error bars."""
    x, A, y = measured(angles)
    dip, training = trained(A, y, args.cache)
    start = time.perf_counter()
    rec = linearized(dip, A, y, tuning_steps=SETTINGS["em"], progress=False, **options())
    tuned = time.perf_counter() - start
    std = rec.std
    refined = rec.refine()
    seconds, peak = time.perf_counter() - start, peak_mb()
    figure = reconstruction_figure(rec, x[0], A.fbp(y)[0])
    figure.savefig(args.out / f"shepp-logan-{angles}.png", dpi=110)
    floor = image_noise(A, (SETTINGS["noise"] * A(x).abs().mean()).item() ** 2)
    error = (rec.mean - x[0]).abs()
    return {
        "angles": angles,
        "measurements": y.numel(),
        "samples": SETTINGS["samples"],
        "threads": torch.get_num_threads(),
        "seconds": {"training": training, "EM": tuned, "EM, std and refinement": seconds},
        "peak": peak,
        "psnr": {
            "FBP": psnr(A.fbp(y), x),
            "TV": max(psnr(total_variation_reconstruction(A, y, p).image, x) for p in PENALTIES),
            "DIP": psnr(rec.mean, x[0]),
            "DIP, refined": psnr(refined.mean, x[0]),
        },
        "log likelihood": rec.log_likelihood(x[0], 1, floor),
        "within two std": (error <= 2 * (std**2 + floor).sqrt()).float().mean().item(),
        "correlation of |error| and std": torch.corrcoef(torch.stack([error.flatten(), std.flatten()]))[0, 1].item(),
        "history": rec.posterior.history,
    }


def solvers(args: argparse.Namespace) -> dict:
    """Count iterations for the samples of one tuned model, with and without preconditioner and warm start."""
    angles = SETTINGS["angles"][0]
    _, A, y = measured(angles)
    dip, _ = trained(A, y, args.cache)
    before, last = json.loads((args.out / f"shepp-logan-{angles}.json").read_text())["history"][-2:]
    found: dict = {"angles": angles, "tolerance": SETTINGS["tolerance"]}
    for name, chosen in SOLVERS.items():
        start = time.perf_counter()
        rec = at(last, dip, A, y, options() | chosen | {"max_iterations": CAP})
        found[name] = counted(rec, start)
        print(name, found[name], flush=True)
    rec = at(before, dip, A, y, options())
    start = time.perf_counter()
    rec.posterior.prior.precision = torch.tensor(last["precision"])
    rec.posterior.likelihood.noise = last["noise"]
    rec.posterior._statistics()
    return found | {"sketch of rank 500, warm": counted(rec, start)}


def at(state: dict, dip: DeepImagePrior, A: RayTransform, y: Tensor, chosen: dict) -> Reconstruction:
    """Return the model with the hyperparameters of a step of EM."""
    prior = partial(Grouped, by="layer", precision=torch.tensor(state["precision"]))
    return linearized(dip, A, y, tune=None, noise=state["noise"], progress=False, **chosen | {"prior": prior})


def counted(rec: Reconstruction, start: float) -> dict:
    solution, seconds = rec.posterior.solution, time.perf_counter() - start
    return {"iterations": solution.iterations, "residual": solution.residual, "seconds": seconds}


def report(out: Path) -> str:
    lines = ["# The head of Shepp and Logan at 128², matrix-free", "", "`make reproduce-ct`; settings in ct.json.", ""]
    lines += [
        "| angles | measurements | PSNR: FBP | TV | DIP | refined | log likelihood | within two std "
        "| corr. of error, std | training, min | EM, std, refinement, min | peak, GB |",
        "|---" * 12 + "|",
    ]
    for angles in SETTINGS["angles"]:
        if (file := out / f"shepp-logan-{angles}.json").exists():
            run = json.loads(file.read_text())
            cells = [
                str(angles),
                str(run["measurements"]),
                *(f"{run['psnr'][name]:.2f}" for name in ("FBP", "TV", "DIP", "DIP, refined")),
                f"{run['log likelihood']:.3f}",
                f"{run['within two std']:.3f}",
                f"{run['correlation of |error| and std']:.2f}",
                f"{run['seconds']['training'] / 60:.1f}",
                f"{run['seconds']['EM, std and refinement'] / 60:.1f} ({run['threads']} threads)",
                f"{run['peak'] / 1e3:.1f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    if (file := out / "shepp-logan-solvers.json").exists():
        run = json.loads(file.read_text())
        told = f"{run['angles']} angles, to a residual of {run['tolerance']} in each one's own norm"
        lines += ["", f"Samples of the tuned model, {told}:", ""]
        lines += ["| preconditioner and start | iterations | residual | seconds |", "|---|---|---|---|"]
        for name, row in run.items():
            if isinstance(row, dict):
                lines.append(f"| {name} | {row['iterations']} | {row['residual']:.2g} | {row['seconds']:.0f} |")
    drawn = [angles for angles in SETTINGS["angles"] if (out / f"shepp-logan-{angles}.json").exists()]
    lines += ["", *(f"![{angles} angles](shepp-logan-{angles}.png)" for angles in drawn), ""]
    text = "\n".join(lines)
    (out / "shepp_logan.md").write_text(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="60,200,solvers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path("build/ct"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/ct"))
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    origin = commit()  # of the code that runs, whatever is committed meanwhile
    args.out.mkdir(parents=True, exist_ok=True)
    for name in () if args.report else args.only.split(","):
        path = args.out / f"shepp-logan-{name}.json"
        if not path.exists():
            found = solvers(args) if name == "solvers" else one(int(name), args)
            path.write_text(json.dumps(found | {"commit": origin, "machine": machine()}, indent=1) + "\n")
    print(report(args.out))


if __name__ == "__main__":
    main()
