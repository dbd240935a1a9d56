"""CT from a sinogram file: what the scanner wrote goes in, an image with error bars comes out.

The file is what `ntkgp reconstruct` takes, too: `sinogram` (angles x detectors) and `angles`, here in degrees. This one
is of a fan beam that went around two thirds of a half turn only: edges that no ray ran along stay open, and the
standard deviation shows which. It is made up on the way if it is not there.

    python examples/sinogram_file.py --output demo
"""

from pathlib import Path

import numpy as np
import torch
from workbench import arguments, plt

import ntkgp
from ntkgp.inverse import RayTransform, UNet, phantoms
from ntkgp.report.figures import pixel_image

SCANNER = {"source_origin": 80.0, "source_detector": 120.0, "detectors": 64, "detector_spacing": 1.6}


def scan(path: Path, size: int) -> None:
    """Write what the scanner would."""
    degrees = np.linspace(0, 120, 20)
    clean = RayTransform.fan(size, torch.as_tensor(np.deg2rad(degrees)), **SCANNER)(phantoms.discs(size).unsqueeze(0))
    noisy = clean + 0.05 * clean.mean() * torch.randn_like(clean)
    np.savez(path, sinogram=noisy[0, 0].numpy(), angles=degrees)


def main() -> None:
    args = arguments(__doc__)
    size, steps, tuning = (16, 60, 2) if args.small else (32, 1500, 30)
    torch.manual_seed(0)
    if not (path := args.output / "scan.npz").exists():
        scan(path, size)

    with np.load(path) as file:
        y, angles = torch.as_tensor(file["sinogram"])[None, None], torch.as_tensor(np.deg2rad(file["angles"]))
    A = RayTransform.fan(size, angles, **SCANNER)
    rec = ntkgp.reconstruct(A, y, UNet(channels=16), steps=steps, rate=3e-3, tuning_steps=tuning)

    fbp, mean, std = A.fbp(y)[0], rec.mean, rec.std
    misfit = (A(mean.unsqueeze(0).to(y)) - y).square().mean().sqrt()
    sigma = rec.posterior.likelihood.noise.item() ** 0.5
    print(f"{path}: {len(angles)} angles x {y.shape[-1]} detectors")
    print(f"measurement explained to {misfit:.3f}, noise by evidence {sigma:.3f}")
    print(f"standard deviation: median {std.median():.4f}, largest {std.max():.4f}")
    figure, axes = plt.subplots(1, 3, figsize=(7.2, 2.6), layout="constrained")
    pixel_image(fbp, axes[0], "filtered back-projection")
    pixel_image(mean, axes[1], "mean")
    pixel_image(std, axes[2], "standard deviation", "magma", (0.0, std.max().item()))
    figure.savefig(args.output / "sinogram_file.png", dpi=150)
    print(f"figure: {args.output}/sinogram_file.png")


if __name__ == "__main__":
    main()
