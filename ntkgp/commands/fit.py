"""Error bars for a trained network: fit its posterior, tune its prior by the evidence, and save both.

network is package.module:make_net, a function without arguments that returns the torch.nn.Module; the current
directory comes first on the path. The weights are a safetensors file (safetensors.torch.save_model(net, path)), the
data an .npz file with X and y. The output folder is what ntkgp tune, predict and report take.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

import ntkgp
from ntkgp.commands.answer import Answer, rows, warnings_told
from ntkgp.commands.arguments import add_model_arguments, nonnegative
from ntkgp.commands.folder import check_folder
from ntkgp.commands.network import make_network
from ntkgp.commands.points import read_points
from ntkgp.commands.saved import FILES, SavedPosterior, write_posterior
from ntkgp.posteriors import Posterior, subsets
from ntkgp.posteriors.fit import METHODS, PRIORS, as_likelihood
from ntkgp.posteriors.tuning import settings

NAME, HELP = "fit", "error bars for a trained network"
_FLAGS = ("net", "data", "likelihood", "method", "prior", "tune", "weights", "progress", "seed")
_RANDOM = ("sampled", "variational")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, metavar="FOLDER", help="where the posterior goes")
    add("--overwrite", action="store_true", help="replace an earlier posterior in that folder")
    add("--method", choices=METHODS, default="auto", help="auto: the cheapest exact one that fits memory (default)")
    add(
        "--prior",
        choices=(*PRIORS, "g_prior"),
        default="isotropic",
        help="whose precisions the evidence tunes (default: %(default)s)",
    )
    add("--no-tune", dest="tune", action="store_false", help="leave precisions and noise at 1")
    add(
        "--option",
        action="append",
        default=[],
        type=_option,
        metavar="KEY=VALUE",
        help="of ntkgp.fit or the method: subset=500, rank=20, num_inducing=100, structure=kron ...; may be repeated",
    )
    add("--seed", type=nonnegative(int), default=0, help="of all that is random (default: 0)")


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (equals and key.isidentifier()):
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, but is {text!r}")
    if key in _FLAGS:
        raise argparse.ArgumentTypeError(f"{key} has an argument of its own")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value  # a word


def run(args: argparse.Namespace) -> Answer:
    """Read, fit and write; nothing is written if anything fails."""
    check_folder(args.output, FILES, args.overwrite)  # before minutes of work
    torch.manual_seed(args.seed)
    net = make_network(args.network, args.weights, None if args.dtype is None else getattr(torch, args.dtype))
    likelihood = as_likelihood(args.likelihood)
    data = read_points(args.data, net, likelihood)
    start = time.perf_counter()
    with warnings_told(args.parser.prog) as told:
        options = _options(args)
        post = ntkgp.fit(net, data, likelihood, args.method, args.prior, args.tune, **options)
    saved = SavedPosterior(post, net, args.network, time.perf_counter() - start)
    write_posterior(saved, args.output, args.overwrite)
    return described(saved, args.output, told)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = dict(args.option)
    if isinstance(options.get("subset"), int):
        options["subset"] = subsets.Random(options["subset"], args.seed)
    if args.method in _RANDOM or options.get("structure") in _RANDOM:
        options["seed"] = args.seed
    return options


def described(saved: SavedPosterior, output: Path, told: list[str], since: int = 0) -> Answer:
    """Say what was found; tuning began at step ``since`` of the history."""
    post = saved.posterior
    values = {
        "output": str(output),
        "method": post.method,
        "reason": post.reason,
        "num_data": len(post.model.data),
        "num_params": post.lin.num_params,
        "num_outputs": post.lin.num_outputs,
        **_tuned(post, since),
        "seconds": saved.seconds,
        "warnings": told,
    }
    lines = {
        "posterior": f"{output} ({post.method}, {post.lin.num_params} weights, outputs: {post.lin.num_outputs})",
        "why": post.reason,
    }
    for name in ("log_evidence", "precision", "noise", "temperature"):
        if name in values:
            lines[name.replace("_", " ")] = _brief(values[name])
    lines["took"] = f"{saved.seconds:.1f} s"
    return Answer(rows(lines), values)


def _tuned(post: Posterior, since: int) -> dict[str, Any]:
    """Return hyperparameters, and the evidence of the last step of tuning, or the best validation score."""
    last = post.history[-1] if post.history else {}
    found = {"log_evidence": last["log_evidence"]} if "log_evidence" in last else {}
    scores = [step.get("validation_log_prob", math.nan) for step in post.history[since:]]
    known = [score for score in scores if not math.isnan(score)]
    return found | ({"validation_log_prob": max(known)} if known else {}) | settings(post)


def _brief(value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    shown = ", ".join(f"{v:.4g}" for v in values[:8])
    return shown + (f", ... ({len(values)} numbers)" if len(values) > 8 else "")
