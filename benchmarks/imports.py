"""How long an import takes when torch is loaded already, and how much memory it keeps.

    python benchmarks/imports.py [--peer PYTHON]

New processes import torch and torch.distributed, and then the Accelerator; timed is the second import. Those of accel,
of the drop-in, which has all names of the original, and, with --peer, of accelerate 1.15.0 take turns; shown are the
medians, in milliseconds, and in MiB of memory that is the process's own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

ROUNDS = 9
PROBE = """
import time, torch, torch.distributed
def own():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
before, begun = own(), time.perf_counter()
from {package} import Accelerator
print((time.perf_counter() - begun) * 1e3, (own() - before) / 1024)
"""


def once(python: str, package: str) -> tuple[float, float]:
    """Return the milliseconds of one import in a new process, and the MiB that it keeps."""
    compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    probe = [python, "-c", PROBE.format(package=package)]
    done = subprocess.run(probe, stdout=subprocess.PIPE, text=True, check=True, env=compiled)
    took, kept = map(float, done.stdout.split())
    return took, kept


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python that has accelerate 1.15.0 installed")
    args = parser.parse_args()
    cases = {
        "accel": (sys.executable, "accel_core", "≤ 60", ""),
        "the drop-in": (sys.executable, "accelerate", "≤ the original's", "≤ 3.5"),
    }
    if args.peer:
        cases["accelerate 1.15.0"] = (args.peer, "accelerate", "", "")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for turn in range(ROUNDS + 1):
        for name, (python, package, *_) in cases.items():
            measured = once(python, package)
            if turn:  # the first may write compiled files
                found[name].append(measured)
    print("| library | import after torch, ms | target | memory it keeps, MiB | target |\n|---|---|---|---|---|")
    for name, (_, _, soon, small) in cases.items():
        took, kept = (statistics.median(column) for column in zip(*found[name], strict=True))
        print(f"| {name} | {took:.0f} | {soon} | {kept:.1f} | {small} |")


if __name__ == "__main__":
    main()
