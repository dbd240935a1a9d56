"""``ntkgp`` on the command line: one subcommand for each module of :mod:`ntkgp.commands`."""

import argparse
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from ntkgp.commands import demo, fit, plan, predict, reconstruct, report, tune

__all__ = ["main"]

COMMANDS = (demo, plan, fit, tune, predict, report, reconstruct)
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130  # exit codes; 130 is what shells give Ctrl-C
_OF_INPUT = ValueError, TypeError, OSError, ImportError, RuntimeError  # RuntimeError: matrices that do not factorise


class Parser(argparse.ArgumentParser):
    """A parser that complains in one line."""

    def error(self, message: str) -> NoReturn:
        """End the program with exit code 2."""
        self.end(BAD_INPUT, message)

    def end(self, code: int, message: str) -> NoReturn:
        """End the program with one line on stderr."""
        line = " ".join(message.split())
        self.exit(code, f"{self.prog}: {line}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and print its answer.

    Bad input ends with exit code 2, Ctrl-C with 130, anything else that fails with 1; each with one line on stderr.

    Args:
        argv: the words after ``ntkgp``; by default those of the process.
    """
    parser = Parser(prog="ntkgp", description="Gaussian processes from trained networks.")
    parser.add_argument("--version", action="version", version=f"ntkgp {version('ntkgp')}")
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for command in COMMANDS:
        formatter = argparse.RawDescriptionHelpFormatter
        added = subparsers.add_parser(
            command.NAME, help=command.HELP, description=command.__doc__, formatter_class=formatter
        )
        command.add_arguments(added)
        add = added.add_argument_group("of every command").add_argument
        add("--json", action="store_true", help="print the result as one line of JSON; all else goes to stderr")
        add("--traceback", action="store_true", help="if it fails, show where")
        added.set_defaults(run=command.run, parser=added)
    args = parser.parse_args(argv)
    try:
        answer = args.run(args)
    except KeyboardInterrupt:
        args.parser.end(INTERRUPTED, "interrupted; nothing was written")
    except Exception as error:
        if args.traceback:
            traceback.print_exc()
        if isinstance(error, _OF_INPUT):
            args.parser.error(str(error) or type(error).__name__)
        args.parser.end(FAILED, f"{type(error).__name__}: {error} (--traceback shows where)")
    print(answer.json() if args.json else answer.text)
    return 0
