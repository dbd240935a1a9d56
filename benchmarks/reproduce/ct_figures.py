"""Figures of one KMNIST image from 20 projections: what the priors look like, the reconstruction, and its calibration.

python benchmarks/reproduce/ct_figures.py --data DIR
"""

import argparse
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch

from ntkgp.inverse import Reconstruction, linearized
from ntkgp.report.figures import calibration_figure, convergence_figure, reconstruction_figure

sys.path.insert(0, str(Path(__file__).parent.parent))
from ct import measured, penalty_of, prior_of

mpl.use("Agg")
ANGLES, INDEX, DRAWS = 20, 0, 6
PRIORS = {
    "filters as GPs,\nTV-PredCP": {"tune": "predcp"},
    "filters as GPs,\nevidence": {"tune": "evidence"},
    "independent weights,\nevidence": {"prior": "layerwise"},
}


def prior_figure(found: dict[str, Reconstruction]) -> plt.Figure:
    """Draw images of each prior around the network's, on one grey scale."""
    figure, axes = plt.subplots(
        len(found), DRAWS + 1, figsize=(1.35 * (DRAWS + 1), 1.5 * len(found)), layout="constrained", squeeze=False
    )
    for row, (name, rec) in zip(axes, found.items(), strict=True):
        draws = rec.sample_prior(DRAWS, torch.Generator().manual_seed(0))
        for axis, image in zip(row, [rec.mean, *draws], strict=True):
            axis.imshow(image[0], cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(name, fontsize=8)
    axes[0, 0].set_title("network", fontsize=9)
    axes[0, (DRAWS + 1) // 2].set_title("draws of the tuned prior", fontsize=9)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("docs/results/ct"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    (x, A, y, _), penalty = measured(args.data, INDEX, ANGLES), penalty_of(ANGLES)
    dip = prior_of(A, y, penalty)
    found = {name: linearized(dip, A, y, penalty=penalty, **options) for name, options in PRIORS.items()}
    rec = list(found.values())[1]
    for name, figure in {
        "priors": prior_figure(found),
        "kmnist": reconstruction_figure(rec, x[0], A.fbp(y)[0]),
        "kmnist-calibration": calibration_figure(rec, x[0]),
        "kmnist-convergence": convergence_figure(rec),
    }.items():
        figure.savefig(args.out / f"{name}.png", dpi=130)
        print(args.out / f"{name}.png")


if __name__ == "__main__":
    main()
