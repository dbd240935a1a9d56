"""What both peer runners share: the cases, the command line, the clock and the JSON line (standard library only)."""

import argparse
import json
import resource
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version

INPUT_SHAPE = {"mlp": (784,), "lenet": (1, 28, 28)}  # channels first
NUM_PARAMS = {"mlp": 199_210, "lenet": 85_822}
NUM_OUTPUTS = 10
SEED = 0


def parser(description: str) -> argparse.ArgumentParser:
    """The options every runner understands; a runner may add its own."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--case", choices=sorted(INPUT_SHAPE), required=True)
    options.add_argument("--n", type=int, default=200, help="number of inputs")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--threads", type=int, default=2)
    return options


def stopwatch(jobs: Iterable[Callable[[], object]]) -> list[float]:
    """Seconds of each job; what the iterable does to prepare the next job is not counted."""
    seconds = []
    for job in jobs:
        start = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - start)
    return seconds


def report(peer: str, case: str, n: int, seconds: list[float]) -> None:
    """Print the result as one line of JSON; ``peak_mb`` is the whole process's ``ru_maxrss`` in MiB."""
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB
    result = {"peer": peer, "version": version(peer), "case": case, "n": n}
    print(json.dumps(result | {"seconds": [round(s, 4) for s in seconds], "peak_mb": round(peak_mb, 1)}))
