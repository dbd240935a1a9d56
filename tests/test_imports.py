"""What ``import ntkgp`` brings along."""

import subprocess
import sys

HEAVY = "matplotlib", "sklearn", "scipy", "botorch", "pandas", "IPython", "hypothesis", "pytest"


def test_nothing_heavy_or_optional_is_imported_before_it_is_used():
    code = (
        "import sys, gpytorch\n"
        "there = set(sys.modules)\n"  # what GPyTorch needs is there anyway
        "import ntkgp, ntkgp.cli\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - there}))"
    )
    brought = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "ntkgp" in brought
    assert [name for name in HEAVY if name in brought] == []


def test_what_is_imported_later_is_there_all_the_same():
    code = (
        "import sys, ntkgp\n"
        "later = [name for name in ('inverse', 'training', 'report', 'interop') if 'ntkgp.' + name in sys.modules]\n"
        "print(later, set(dir(ntkgp)) >= set(ntkgp.__all__), all(hasattr(ntkgp, name) for name in ntkgp.__all__))\n"
        "print(ntkgp.reconstruct is ntkgp.inverse.reconstruct, hasattr(ntkgp, 'nothing'))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split("\n")
    assert told[:2] == ["[] True True", "True False"]
