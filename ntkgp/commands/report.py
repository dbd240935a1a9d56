"""One page on what a posterior is worth on test data: scores before and after with their errors, and figures.

The page needs no network and no files beside it. The posterior is a folder that ntkgp fit wrote; the test file holds X
and y, the file of other data X.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from ntkgp.commands.answer import Answer, warnings_told
from ntkgp.commands.arguments import nonnegative
from ntkgp.commands.folder import check_file, whole_file
from ntkgp.commands.points import read_inputs, read_points
from ntkgp.commands.saved import read_posterior
from ntkgp.report import Report, report

NAME, HELP = "report", "one page on what a posterior is worth on test data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("posterior", type=Path, metavar="FOLDER", help="that ntkgp fit wrote")
    add("--test", type=Path, required=True, metavar="t.npz", help="X and y that it was not fitted to")
    add("--ood", type=Path, metavar="o.npz", help="X from elsewhere, which it should be uncertain about")
    add("-o", "--output", type=Path, required=True, metavar="report.html", help="where the page goes")
    add("--overwrite", action="store_true", help="replace an earlier file")
    add("--seed", type=nonnegative(int), default=0, help="of the samples (default: 0)")
    add("--title", default="Error bars of a network", help="of the page")


def run(args: argparse.Namespace) -> Answer:
    """Read, predict and write; nothing is written if anything fails."""
    check_file(args.output, args.overwrite)
    saved = read_posterior(args.posterior)
    likelihood = saved.posterior.likelihood
    test = read_points(args.test, saved.net, likelihood)
    ood = None if args.ood is None else read_inputs(args.ood, saved.net, likelihood)[0]
    with warnings_told(args.parser.prog) as told:
        found = report(saved.posterior, test, ood, title=args.title, seconds=saved.seconds, seed=args.seed)
    with whole_file(args.output, args.overwrite) as file:
        found.save(file)
    return scored(found, args.output, told)


def scored(found: Report, page: Path, told: list[str]) -> Answer:
    """Say what a report found."""
    lines = [f"{'':22}{'network alone':>18}{'posterior':>18}{'difference':>18}"]
    for s in found.scores.values():
        lines.append(f"{s.name:22}{s.before!s:>18}{s.after!s:>18}{s.difference!s:>18}")
    lines += [f"{f'AUC by {name}':40}{score!s:>18}" for name, score in found.detection.items()]
    values = {
        "page": str(page),
        "scores": {name: asdict(s) for name, s in found.scores.items()},
        "detection": {name: asdict(s) for name, s in found.detection.items()},
        "warnings": told,
    }
    return Answer("\n".join([*lines, str(page)]), values)
