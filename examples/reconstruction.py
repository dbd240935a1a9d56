"""The Shepp-Logan head from twenty noisy projections: back-projection, total variation, a network with error bars.

The network sees nothing but the measurement. Linearised at its weights it is a Gaussian model of the image, whose
prior and noise are tuned by the evidence; its standard deviations say where the image may be wrong. On this one they
find the places, and are too small: see the figure of calibration.

    python examples/reconstruction.py --output demo
"""

import argparse
import time
from pathlib import Path

import torch

import ntkgp
from ntkgp.inverse import RayTransform, UNet, phantoms, total_variation_reconstruction
from ntkgp.report.figures import calibration_figure, convergence_figure, reconstruction_figure
from ntkgp.report.metrics import psnr

SIZE, ANGLES, NOISE = 28, 20, 0.05  # noise relative to the mean of the sinogram
TV_PENALTIES = 0.01, 0.03, 0.1  # the best for the true image is shown, which flatters it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder for the figures")
    parser.add_argument("--steps", type=int, default=1000, help="training steps of the network")
    parser.add_argument("--tuning-steps", type=int, default=30, help="of the evidence")
    parser.add_argument("--small", action="store_true", help="few steps of training and tuning")
    args = parser.parse_args()
    if args.small:
        args.steps, args.tuning_steps = 50, 2
    args.output.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()

    torch.manual_seed(0)
    truth = phantoms.shepp_logan(SIZE).unsqueeze(0)
    A = RayTransform.parallel(SIZE, ANGLES)
    y = A(truth)
    sigma = NOISE * y.mean()
    y = y + sigma * torch.randn_like(y)

    fbp = A.fbp(y)
    tv = max((total_variation_reconstruction(A, y, p).image for p in TV_PENALTIES), key=lambda x: psnr(x, truth))
    net = UNet(channels=8, scales=2)
    rec = ntkgp.reconstruct(A, y, net, steps=args.steps, rate=3e-3, tuning_steps=args.tuning_steps)

    print(f"{SIZE} x {SIZE} pixels, {ANGLES} projections, {NOISE:.0%} noise")
    for name, image in {"filtered back-projection": fbp[0], "total variation": tv[0], "network": rec.mean}.items():
        print(f"{name:26}{psnr(image, truth[0]):5.1f} dB")
    within = ((truth[0] - rec.mean).abs() <= 2 * rec.std).double().mean()
    print(f"noise: {rec.posterior.likelihood.noise.item():.4f} by evidence, {sigma**2:.4f} in truth")
    print(f"pixels within two standard deviations: {within:.0%}")
    figures = {
        "reconstruction": reconstruction_figure(rec, truth, fbp),
        "reconstruction_calibration": calibration_figure(rec, truth),
        "reconstruction_convergence": convergence_figure(rec),
    }
    for name, figure in figures.items():
        figure.savefig(args.output / f"{name}.png", dpi=150)
    print(f"{time.perf_counter() - start:.0f} s; figures in {args.output}/")


if __name__ == "__main__":
    main()
