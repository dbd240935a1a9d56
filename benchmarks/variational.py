"""Sparse variational processes: beside VaLLA and ELLA on FashionMNIST, on a pretrained ResNet-20, and what steps cost.

    python benchmarks/variational.py --data DIR --peers DIR [--only fashion,cifar,cost] [--threads 2]

Each section keeps its figures in benchmarks/results/variational/<section>.json; the table is made of what is there, and
``--only ""`` makes it again. Sections run one after the other, each in a process of its own; their parts are kept under
build/variational, and what is there is not run again.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from harness import HERE, Table, commit, machine
from sparse_cifar import cifar, cifar_rows
from sparse_cost import cost, cost_rows
from sparse_fashion import fashion, fashion_rows

OUT = HERE / "results" / "variational"
SECTIONS = {"fashion": (fashion, fashion_rows), "cifar": (cifar, cifar_rows), "cost": (cost, cost_rows)}


def report() -> str:
    """Return the table of the sections that have run, and where they come from."""
    table, origins = Table(), []
    for name, (_, rows) in SECTIONS.items():
        if (path := OUT / f"{name}.json").exists():
            found = json.loads(path.read_text())
            rows(found, table)
            commits, minutes = origin_of(found)
            origins.append(f"- {name}: commits {', '.join(commits)}, {found['machine']}, {minutes:.0f} minutes")
    text = "`make bench-variational`, float32, seed 0, section by section; ratios are theirs over ours.\n\n"
    return (
        f"# Sparse variational processes\n\n{text}"
        + "\n".join(origins)
        + f"\n\n{table}\n\n![NLL](variational/fashion.png)\n"
    )


def origin_of(found: dict) -> tuple[list[str], float]:
    """Return the commits that a section or its parts were run at, and how long these took."""
    parts = [origin_of(part) for part in found.values() if isinstance(part, dict)]
    commits = {commit for of, _ in parts for commit in of} or {found[key] for key in ("commit",) if key in found}
    return sorted(commits), max(sum(minutes for _, minutes in parts), found.get("minutes", 0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peers", type=Path, default=Path(".peers"))
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path("build/images"))
    parser.add_argument("--budget", type=float, default=300, help="seconds that VaLLA may train")
    parser.add_argument("--values", type=int, default=400, help="inducing values of the ResNet-20")
    parser.add_argument("--subset", type=int, default=50, help="images of the ResNet-20's subset GP; 0 for none")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    OUT.mkdir(parents=True, exist_ok=True)
    origin = commit()  # of the code that runs, whatever is committed meanwhile
    names = [name for name in args.only.split(",") if name]
    for name in names:
        start = time.perf_counter()
        if len(names) == 1:
            found = SECTIONS[name][0](args) | {"commit": origin, "machine": machine()}
            found["minutes"] = (time.perf_counter() - start) / 60
            (OUT / f"{name}.json").write_text(json.dumps(found, indent=1, default=float) + "\n")
        else:  # a process of its own, so that its peak of memory is its own
            subprocess.run([sys.executable, *sys.argv, "--only", name], check=True)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    text = report()
    (HERE / "results" / "variational.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
