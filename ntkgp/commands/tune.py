"""Tune the prior's precisions, and the noise, of a posterior that ntkgp fit wrote: by evidence, or validation data.

The posterior is replaced in place, whole or not at all, unless --output names another folder.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

from ntkgp.commands.answer import Answer, warnings_told
from ntkgp.commands.arguments import positive
from ntkgp.commands.fit import described
from ntkgp.commands.folder import check_folder
from ntkgp.commands.points import read_points
from ntkgp.commands.saved import FILES, read_posterior, write_posterior

NAME, HELP = "tune", "a posterior's prior and noise, by evidence or on validation data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("posterior", type=Path, metavar="FOLDER", help="that ntkgp fit wrote")
    add("-o", "--output", type=Path, metavar="FOLDER", help="where the tuned posterior goes (default: in place)")
    add("--overwrite", action="store_true", help="replace an earlier posterior in --output")
    add("--validation", type=Path, metavar="v.npz", help="X and y to choose precisions by (default: by evidence)")
    add("--temperatures", type=positive(float), nargs="+", help="of the likelihood, for --validation to choose from")
    add("--at", choices=("linear_mode", "map"), help="where the evidence is evaluated (default: linear_mode)")
    add("--steps", type=positive(int), help="at most")


def run(args: argparse.Namespace) -> Answer:
    """Read, tune and write; nothing is written if anything fails."""
    output = args.output or args.posterior
    overwrite = args.overwrite or args.output is None
    if args.output is not None:
        check_folder(args.output, FILES, args.overwrite)
    saved = read_posterior(args.posterior)
    options = {name: getattr(args, name) for name in ("at", "steps") if getattr(args, name) is not None}
    if args.validation is not None:
        if options:
            raise ValueError(f"--{next(iter(options))} is for tuning by evidence, but --validation is given")
        options["validation"] = read_points(args.validation, saved.net, saved.posterior.likelihood)
    if args.temperatures is not None:
        options["temperatures"] = args.temperatures
    start, since = time.perf_counter(), len(saved.posterior.history)
    with warnings_told(args.parser.prog) as told:
        saved.posterior.tune(**options)
        saved.posterior._prepare()
    saved = replace(saved, seconds=saved.seconds + time.perf_counter() - start)
    write_posterior(saved, output, overwrite)
    return described(saved, output, told, since)
