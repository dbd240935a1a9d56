"""Reconstruct an image with error bars from the sinogram of a CT scan.

The .npz file holds ``sinogram`` (angles x detectors), ``angles``, and ``truth`` (N x N) if the image is known. The
output folder gets arrays (reconstruction.npz), figures (.png) and one page with all of it (index.html). The network's
images lie between 0 and 1: divide a sinogram by the largest value that its image may have.
"""

import argparse
import inspect
import time
from pathlib import Path

import torch

import ntkgp
from ntkgp.commands.answer import Answer, warnings_told
from ntkgp.commands.arguments import nonnegative, positive
from ntkgp.commands.folder import whole_folder
from ntkgp.commands.scan import Scan, read_scan
from ntkgp.inverse import RayTransform, Reconstruction
from ntkgp.inverse.priors import PRIORS
from ntkgp.inverse.setting import METHODS, TUNINGS

NAME, HELP = "reconstruct", "an image with error bars from a sinogram"
_DEFAULTS = {name: p.default for name, p in inspect.signature(ntkgp.reconstruct).parameters.items()}
_SAMPLES = 16  # as many as a sampled posterior has by default
_NO_SETTINGS = ("run", "parser", "json", "traceback", "output", "overwrite")  # they do not change the result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("file", type=Path, metavar="sinogram.npz", help="sinogram, angles, and truth if it is known")
    add("-o", "--output", type=Path, required=True, metavar="FOLDER", help="where results go")
    add("--overwrite", action="store_true", help="replace earlier results in that folder")
    add = parser.add_argument_group("geometry, lengths in one unit").add_argument
    add("--geometry", choices=("parallel", "fan"), required=True, help="how rays run")
    add("--image-size", type=positive(int), required=True, metavar="N", help="pixels in a row and in a column")
    add("--pixel-size", type=positive(float), default=1.0, help="of the image (default: %(default)s)")
    add("--detector-spacing", type=positive(float), help="distance of detectors (parallel: that of pixels by default)")
    add("--source-origin", type=positive(float), help="fan: from the source to the centre of rotation")
    add("--source-detector", type=positive(float), help="fan: from the source to the detector")
    add("--angles-unit", choices=("radians", "degrees"), default="radians", help="of the file (default: %(default)s)")
    add = parser.add_argument_group("model, see ntkgp.reconstruct").add_argument
    add("--method", choices=METHODS, default=_DEFAULTS["method"], help="auto: exact if memory allows (default)")
    add(
        "--tune",
        choices=(*TUNINGS, "none"),
        default=_DEFAULTS["tune"],
        help="by what prior and noise are tuned (default: %(default)s)",
    )
    add(
        "--prior",
        choices=tuple(PRIORS),
        help="over the network's weights (default: conv_filter, or for samples layerwise)",
    )
    add("--noise", type=positive(float), help="variance of the sinogram's noise (default: it is learnt)")
    add(
        "--penalty",
        type=nonnegative(float),
        default=_DEFAULTS["penalty"],
        help="of total variation (default: %(default)s)",
    )
    add("--steps", type=positive(int), default=_DEFAULTS["steps"], help="of training (default: %(default)s)")
    add("--rate", type=positive(float), default=_DEFAULTS["rate"], help="of training (default: %(default)s)")
    add("--patience", type=positive(int), help="stop training after so many steps without a better loss")
    add("--seed", type=nonnegative(int), default=_DEFAULTS["seed"], help="of network and samples (default: 0)")
    help_samples = "images to draw; the sampled method has its deviations from them, too (default: %(default)s)"
    add("--samples", type=positive(int), default=_SAMPLES, help=help_samples)
    add("--dtype", choices=("float32", "float64"), default="float32", help="of training (default: %(default)s)")


def run(args: argparse.Namespace) -> Answer:
    """Read, reconstruct and write; nothing is written if anything fails.

    Raises:
        ImportError: if there is no matplotlib.
        ValueError: if arguments or the file are not what they should be.
        OSError: if the folder cannot be written.
    """
    from ntkgp.commands import results

    _check(args)
    scan = read_scan(args.file, args.image_size, args.angles_unit, getattr(torch, args.dtype))
    A = _operator(args, scan)
    _check_range(A, scan)
    with whole_folder(args.output, results.FILES, args.overwrite) as folder:
        start = time.perf_counter()
        rec, told = _reconstructed(args, A, scan)
        samples = rec.sample(args.samples, torch.Generator().manual_seed(args.seed))
        settings = {name: value for name, value in vars(args).items() if name not in _NO_SETTINGS}
        settings |= {"file": str(args.file)}
        found = results.Results(rec, A.fbp(scan.y)[0], samples, scan.truth, settings, told, time.perf_counter() - start)
        found.write(folder)
    page = str(args.output / results.PAGE)
    return Answer(page, {"page": page, "noise": found.noise, "seconds": found.seconds, "warnings": told})


def _check(args: argparse.Namespace) -> None:
    """Compare arguments with each other."""
    if args.geometry == "fan":
        for name in ("detector_spacing", "source_origin", "source_detector"):
            if getattr(args, name) is None:
                raise ValueError(
                    f"--geometry fan needs --{name.replace('_', '-')}, a positive length, but it is not given"
                )
    else:
        for name in ("source_origin", "source_detector"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is for --geometry fan, but --geometry is {args.geometry}")
    if args.tune == "predcp" and (args.method == "sampled" or not args.penalty):
        raise ValueError(
            "--tune predcp needs a positive --penalty and a --method other than sampled, but they are "
            f"{args.penalty:g} and {args.method}"
        )


def _operator(args: argparse.Namespace, scan: Scan) -> RayTransform:
    detectors, lengths = scan.y.shape[-1], {"detector_spacing": args.detector_spacing, "pixel_size": args.pixel_size}
    if args.geometry == "parallel":
        return RayTransform.parallel(args.image_size, scan.angles, detectors, **lengths, dtype=scan.y.dtype)
    sources = args.source_origin, args.source_detector
    return RayTransform.fan(args.image_size, scan.angles, *sources, detectors, **lengths, dtype=scan.y.dtype)


def _check_range(A: RayTransform, scan: Scan) -> None:
    """Refuse what no image between 0 and 1 explains, as far as that can be told beforehand."""
    if scan.truth is not None and (scan.truth.min() < 0 or scan.truth.max() > 1):
        low, high = scan.truth.min().item(), scan.truth.max().item()
        raise ValueError(f"truth must lie between 0 and 1, but from {low:.4g} to {high:.4g}: scale it and the sinogram")
    total, largest = scan.y.sum().item(), A(scan.y.new_ones(1, *A.image_shape)).sum().item()
    if not total <= largest:
        raise ValueError(
            f"sinogram must be that of an image between 0 and 1, whose sum is {largest:.4g} at most, but its sum is "
            f"{total:.4g}: scale it"
        )


def _reconstructed(args: argparse.Namespace, A: RayTransform, scan: Scan) -> tuple[Reconstruction, list[str]]:
    """Return the reconstruction and what it warned of."""
    options = {} if args.method == "exact" else {"num_samples": args.samples}
    with warnings_told(args.parser.prog) as told:
        rec = ntkgp.reconstruct(
            A, scan.y, prior=args.prior, tune=None if args.tune == "none" else args.tune, method=args.method,
            noise=args.noise, penalty=args.penalty, steps=args.steps, rate=args.rate, patience=args.patience,
            seed=args.seed, **options,
        )  # fmt: skip
    return rec, told
