"""What a reconstruction leaves on disk: arrays, figures, and one page."""

import json
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ntkgp.inverse import Reconstruction, SampledReconstruction
from ntkgp.report.figures import calibration_figure, convergence_figure, reconstruction_figure
from ntkgp.report.metrics import psnr
from ntkgp.report.page import Plate, Section, Table, page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FILES", "PAGE", "Results"]

ARRAYS, PAGE = "reconstruction.npz", "index.html"
CAPTIONS = {
    "reconstruction": "The mean is the network's image, and samples are others that explain the sinogram as well; the "
    "more they differ at a pixel, the larger is its standard deviation.",
    "calibration": "Points above the line on the left, or steeper than the line on the right, are errors larger than "
    "the standard deviations promise.",
    "convergence": "A loss that still falls asks for more steps, and tuning that has not levelled off makes error bars "
    "doubtful.",
}
FILES = (ARRAYS, PAGE, *(f"{name}.png" for name in CAPTIONS))
_DPI = 150


@dataclass(frozen=True)
class Results:
    """A reconstruction and what is told with it."""

    rec: Reconstruction
    fbp: Tensor  # (1, N, N)
    samples: Tensor  # (S, 1, N, N)
    truth: Tensor | None  # (1, N, N)
    settings: dict[str, Any]
    warnings: list[str]
    seconds: float

    def write(self, folder: Path) -> None:
        """Write all files into a folder."""
        images = {"mean": self.rec.mean[0], "std": self.rec.std[0], "samples": self.samples[:, 0], "fbp": self.fbp[0]}
        arrays: dict[str, Any] = {name: image.numpy() for name, image in images.items()}
        np.savez(folder / ARRAYS, **arrays, noise=self.noise, settings=json.dumps(self.settings))
        plates = []
        for name, figure in self._figures().items():
            file = BytesIO()
            figure.savefig(file, format="png", dpi=_DPI)
            (folder / f"{name}.png").write_bytes(file.getvalue())
            plates.append(Plate(file.getvalue(), CAPTIONS[name]))
        (folder / PAGE).write_text(self._page(plates), encoding="utf-8")

    @property
    def noise(self) -> float:
        """The variance of the measurement's noise, learnt or given."""
        return self.rec.posterior.likelihood.noise.item()

    def _figures(self) -> "dict[str, Figure]":
        found = {"reconstruction": reconstruction_figure(self.rec, self.truth, self.fbp, self.samples)}
        if self.truth is not None:
            found["calibration"] = calibration_figure(self.rec, self.truth)
        return found | {"convergence": convergence_figure(self.rec)}

    def _page(self, plates: list[Plate]) -> str:
        N, (angles, detectors) = self.rec.shape[-1], self.rec.A.measured_shape[1:]
        text = (
            f"An image of {N} x {N} pixels from {angles} projections onto {detectors} detectors: a network trained on "
            f"the sinogram alone, linearised at its weights. It took {self.seconds:.0f} seconds."
        )
        sections = [Section("Result", table=Table.of(self.scores()), plates=plates)]
        if self.warnings:
            sections.append(Section("Warnings", table=Table(list(enumerate(self.warnings, 1)))))
        given = {name.replace("_", " "): value for name, value in self.settings.items() if value is not None}
        sections.append(Section("Settings", table=Table.of(given)))
        return page("Reconstruction with error bars", text, sections)

    def scores(self) -> dict[str, str]:
        """Return what there is to say in numbers."""
        sampled = isinstance(self.rec, SampledReconstruction)
        origin = "learnt" if self.settings["noise"] is None else "given"
        found = {"computed": f"by {len(self.samples)} samples" if sampled else "exactly"}
        found[f"noise variance, {origin}"] = f"{self.noise:.4g}"
        if not sampled:
            found["log evidence"] = f"{self.rec.log_evidence().item():.2f}"
        found["largest standard deviation"] = f"{self.rec.std.max().item():.4g}"
        if self.truth is not None:
            found["PSNR of the mean"] = f"{psnr(self.rec.mean, self.truth):.2f} dB"
            found["PSNR of filtered back-projection"] = f"{psnr(self.fbp, self.truth):.2f} dB"
        return found
