"""``ntkgp`` on the command line: one subcommand for each module of :mod:`ntkgp.commands`."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from ntkgp.commands import reconstruct

__all__ = ["main"]

COMMANDS = (reconstruct,)


class Parser(argparse.ArgumentParser):
    """A parser that complains in one line."""

    def error(self, message: str) -> NoReturn:
        """End the program with exit code 2."""
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: {line}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Bad input ends with exit code 2 and one line on stderr.

    Args:
        argv: the words after ``ntkgp``; by default those of the process.
    """
    parser = Parser(prog="ntkgp", description="Gaussian processes from trained networks.")
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for command in COMMANDS:
        added = subparsers.add_parser(command.NAME, help=command.HELP, description=command.__doc__)
        command.add_arguments(added)
        added.set_defaults(run=command.run, parser=added)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError, ImportError, RuntimeError) as error:  # RuntimeError: matrices that do not factorise
        args.parser.error(str(error))
    return 0
