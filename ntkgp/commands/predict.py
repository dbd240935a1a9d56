"""Predict with error bars, from a posterior that ntkgp fit wrote.

The .npz file holds X, and y if targets are known. The output (.npz or .csv) holds for each point probs and label of
classes, or mean and variance of numbers; epistemic and aleatoric, the two parts of the variance; entropy; and log_prob
where y is known.
"""

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ntkgp.commands.answer import Answer, rows, warnings_told
from ntkgp.commands.arguments import nonnegative, positive
from ntkgp.commands.folder import check_file, whole_file
from ntkgp.commands.points import read_inputs
from ntkgp.commands.saved import read_posterior
from ntkgp.likelihoods import Categorical
from ntkgp.posteriors import Prediction
from ntkgp.report.scores import mean_of

NAME, HELP = "predict", "with error bars, from a posterior"
FORMATS = (".npz", ".csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("posterior", type=Path, metavar="FOLDER", help="that ntkgp fit wrote")
    add("data", type=Path, metavar="x.npz", help="X, and y if it is known")
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="an .npz or .csv file")
    add("--overwrite", action="store_true", help="replace an earlier file")
    add(
        "--predictive",
        choices=("glm", "bnn", "map"),
        default="glm",
        help="of the linear model (default), of sampled networks, or the network alone",
    )
    add("--link", choices=("mc", "probit", "bridge"), help="for classes (default: mc)")
    add("--samples", type=positive(int), default=256, help="of f at each point (default: %(default)s)")
    add("--seed", type=nonnegative(int), default=0, help="of the samples (default: 0)")


def run(args: argparse.Namespace) -> Answer:
    """Read, predict and write; nothing is written if anything fails."""
    if args.output.suffix not in FORMATS:
        raise ValueError(f"--output must end in {' or '.join(FORMATS)}, but is {args.output}")
    check_file(args.output, args.overwrite)
    saved = read_posterior(args.posterior)
    x, y = read_inputs(args.data, saved.net, saved.posterior.likelihood)
    generator = torch.Generator().manual_seed(args.seed)
    with warnings_told(args.parser.prog) as told:
        prediction = saved.posterior.predict(x, args.predictive, args.link, args.samples, generator)
        arrays = arrays_of(prediction)
        if y is not None:
            arrays["log_prob"] = prediction.log_prob(y).detach().numpy()
    with whole_file(args.output, args.overwrite) as file:
        _write(file, arrays)
    values: dict[str, Any] = {"output": str(args.output), "num_points": len(x), "arrays": list(arrays)}
    lines: dict[str, Any] = {"predictions": f"{args.output} ({len(x)} points: {', '.join(arrays)})"}
    if y is not None:
        nll = mean_of(-torch.as_tensor(arrays["log_prob"]).double())
        values |= {"nll": nll.value, "nll_standard_error": nll.error}
        lines["mean −log p(y)"] = str(nll)
    return Answer(rows(lines), values | {"warnings": told})


def arrays_of(prediction: Prediction) -> dict[str, np.ndarray]:
    """Return what a prediction tells of each point."""
    likelihood, C = prediction._likelihood, prediction.mean.shape[1]
    parts = ["epistemic", "aleatoric"] if prediction._epistemic is not None else []  # links in closed form: no parts
    names = ["probs"] if likelihood.discrete else ["mean", "variance"][: 1 + bool(parts)]
    found = {name: getattr(prediction, name).detach().numpy() for name in (*names, *parts, "standard_error")}
    if likelihood.discrete or all(latent.samples is None for latent in prediction._latents):
        with suppress(NotImplementedError):  # not every likelihood knows it
            found["entropy"] = prediction.entropy.detach().numpy()
    if isinstance(likelihood, Categorical) and likelihood.site_size(C) == C:  # of points, not of pixels
        found["label"] = found["probs"].argmax(1)
    return found


def _write(file: Path, arrays: dict[str, np.ndarray]) -> None:
    if file.suffix == ".npz":
        np.savez(file, **arrays)  # type: ignore[arg-type]
        return
    columns = {name: array.reshape(len(array), -1) for name, array in arrays.items()}
    header = [
        name if array.shape[1] == 1 else f"{name}_{i}" for name, array in columns.items() for i in range(array.shape[1])
    ]
    table = np.concatenate([array.astype(np.float64) for array in columns.values()], axis=1)
    np.savetxt(file, table, delimiter=",", header=",".join(header), comments="", fmt="%.9g")
