"""What the benchmarks share: child processes, tables with bars, and results with their commit and machine."""

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

HERE = Path(__file__).parent

__all__ = ["HERE", "Table", "alone", "commit", "kept", "machine", "median", "memory_mb", "peak_mb", "run_json", "write"]


def run_json(command: list, label: str, environment: dict | None = None) -> dict:
    start = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        sys.exit(f"{label} failed:\n{result.stderr}")
    print(f"  {label}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return json.loads(result.stdout.strip().splitlines()[-1])


def alone(work: Callable[..., dict], *args: object) -> dict:
    """Return what a function returns in a process of its own, whose peak of memory is the work's."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


class Table:
    """Rows of (what, figure, bar, whether it is met)."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str, bool]] = []

    def at_least(self, what: str, ratio: float, bar: float, detail: str) -> None:
        """Add a ratio, theirs over ours, and its bar."""
        self.rows.append((what, f"{ratio:.1f}x ({detail})", f">= {bar:g}x", ratio >= bar))

    def at_most(self, what: str, value: float, bar: float, detail: str, form: str = ".2f") -> None:
        """Add a figure and its bar."""
        told = f" ({detail})" if detail else ""
        self.rows.append((what, f"{value:{form}}{told}", f"<= {bar:g}", value <= bar))

    def above(self, what: str, value: float, bar: float, detail: str) -> None:
        """Add a difference, and what it is to be above."""
        told = f" ({detail})" if detail else ""
        self.rows.append((what, f"{value:+.4f}{told}", f"> {bar:g}", value > bar))

    def note(self, what: str, text: str) -> None:
        """Add a figure without a bar."""
        self.rows.append((what, text, "", True))

    def __str__(self) -> str:
        lines = ["| what | measured | bar | met |", "|---|---|---|---|"]
        lines += [f"| {w} | {m} | {b} | {('yes' if ok else 'no') if b else ''} |" for w, m, b, ok in self.rows]
        return "\n".join(lines)


def median(times: list[float]) -> float:
    return statistics.median(times)


def peak_mb() -> float:
    """Largest resident memory of this process so far; ru_maxrss would count the parent's too."""
    return memory_mb("VmHWM")


def memory_mb(key: str) -> float:
    """Resident memory of this process: VmRSS now, VmHWM at its highest."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def kept(path: Path, work: Callable[[], dict], **told: object) -> dict:
    """Return what is in the file, or what the work finds: then that is there, whole, with its origin."""
    if path.exists():
        return json.loads(path.read_text())
    origin, start = commit(), time.perf_counter()  # of the code that runs, whatever is committed meanwhile
    found = work() | told
    found |= {"minutes": (time.perf_counter() - start) / 60, "commit": origin, "machine": machine()}
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(found) + "\n")
    aside.replace(path)
    return found


def commit() -> str:
    """Return the short name of the commit that is checked out."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def machine() -> str:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return f"{model or platform.processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def write(name: str, command: str, title: str, table: Table, raw: dict, start: float) -> None:
    """Print the table and keep it, with the numbers behind it, under results/."""
    minutes = (time.perf_counter() - start) / 60
    origin = f"`{command}` at commit {commit()}, seed 0, {machine()}; {minutes:.0f} minutes."
    text = f"# {title}\n\n{origin} Medians; ratios are theirs over ours.\n\n{table}\n"
    print(text)
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / f"{name}.md").write_text(text)
    (results / f"{name}.json").write_text(json.dumps(raw | {"machine": machine(), "commit": commit()}, indent=1) + "\n")
