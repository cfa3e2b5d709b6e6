"""How long an import takes when torch is loaded already.

    python benchmarks/imports.py [--peer PYTHON]

New processes import torch and torch.distributed, and then the Accelerator; timed is the second import. Those of accel,
of the drop-in, which holds all names of the original at once, and, with --peer, of accelerate 1.15.0 take turns; shown
is the median, in milliseconds.
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
begun = time.perf_counter()
from {package} import Accelerator
print((time.perf_counter() - begun) * 1e3)
"""


def once(python: str, package: str) -> float:
    """Return the milliseconds of one import in a new process."""
    compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    probe = [python, "-c", PROBE.format(package=package)]
    done = subprocess.run(probe, stdout=subprocess.PIPE, text=True, check=True, env=compiled)
    return float(done.stdout)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python that has accelerate 1.15.0 installed")
    args = parser.parse_args()
    cases = {
        "accel": (sys.executable, "accel_core", "≤ 60"),
        "the drop-in": (sys.executable, "accelerate", ""),
    }
    if args.peer:
        cases["accelerate 1.15.0"] = (args.peer, "accelerate", "")
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(ROUNDS + 1):
        for name, (python, package, _) in cases.items():
            taken = once(python, package)
            if turn:  # the first may write compiled files
                times[name].append(taken)
    print("| library | import after torch, ms | target |\n|---|---|---|")
    for name, (_, _, reach) in cases.items():
        print(f"| {name} | {statistics.median(times[name]):.0f} | {reach} |")


if __name__ == "__main__":
    main()
