"""The command line and the settings of the reproductions that train with uncertainty."""

import argparse
import fcntl
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SETTINGS = json.loads((Path(__file__).parent / "training.json").read_text())


def command_line(
    text: str, section: str, small: dict, only: tuple[str, ...] = (), models: tuple[str, ...] = ()
) -> tuple[argparse.Namespace, dict]:
    """Return the options, and the settings of a section of training.json, or those of a try that takes seconds."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="seconds; needs an --out and a --cache of its own")
    parser.add_argument("--report", action="store_true", help="tabulate what is there, run nothing")
    parser.add_argument("--cache", type=Path, default=Path("build/training"), help="runs that are not finished")
    parser.add_argument("--out", type=Path, default=Path("docs/results/training"))
    if only:
        parser.add_argument("--only", choices=only, nargs="*", default=list(only))
    if models:
        parser.add_argument("--models", choices=models, nargs="*", default=[], help="some of them alone")
    args = parser.parse_args()
    if args.small and (args.out == parser.get_default("out") or args.cache == parser.get_default("cache")):
        parser.error("--small needs an --out and a --cache of its own")
    torch.set_num_threads(args.threads)
    args.command = " ".join(["python", *sys.argv])
    return args, merged(SETTINGS[section], small if args.small else {})


def merged(settings: dict, other: dict) -> dict:
    """Return the settings with some in the place of others, parts within parts."""
    nested = {key: merged(settings[key], value) for key, value in other.items() if isinstance(value, dict)}
    return settings | other | nested


@contextmanager
def claimed(path: Path, wait: bool) -> Iterator[bool]:
    """Hold a piece of work that processes share; say whether it is ours, or wait until it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def mean_and_error(values: list[float], digits: int) -> str:
    """Return mean ± standard error, as text."""
    v = torch.tensor(values, dtype=torch.float64)
    return f"{v.mean():.{digits}f}" + (f" ± {v.std() / len(v) ** 0.5:.{digits}f}" if len(v) > 1 else "")
