"""How long the command takes to say something, and to start something.

    python benchmarks/launch.py [--peer PYTHON] [--rounds N]

Each line is the median of paired runs in turns: the command, and what it is measured against (an empty interpreter,
`python script.py`, plain torchrun, an import of torch). With --peer, accelerate 1.15.0's command takes part too. Run
it on a quiet machine; times are wall-clock seconds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GOALS = {
    "accel --help": 0.15,
    "accel launch --help": 0.15,
    "one process, over python": 0.15,
    "two processes, over torchrun": 0.1,
    "accel env, over import torch": 0.3,
}


def timed(words: list[str], folder: str) -> float:
    """Return the seconds of one run.

    Raises:
        SystemExit: The run failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": folder}
    begin = time.perf_counter()
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{words} ended with {done.returncode}: {done.stderr[-500:]}")
    return seconds


def commands(python: str, program: str) -> dict[str, list[str]]:
    """Return what is measured for one command: name and command line.

    Args:
        python: The interpreter that has it.
        program: Path of the command.
    """
    several = (
        ["--cpu", "--num_processes", "2"] if program.endswith("accel") else ["--multi_gpu", "--num_processes", "2"]
    )
    return {
        "--help": [program, "--help"],
        "launch --help": [program, "launch", "--help"],
        "one process": [program, "launch", "--cpu", "--num_processes", "1", "empty.py"],
        "two processes": [program, "launch", *several, "empty.py"],
        "env": [program, "env"],
    }


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="Python with accelerate 1.15.0")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    python = sys.executable
    accel = str(Path(python).parent / "accel")
    torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    lines: dict[str, list[str]] = {
        "python script.py": [python, "empty.py"],
        "torchrun": [*torchrun, "--standalone", "empty.py"],
        "torchrun, fixed port": [*torchrun, "--master-port", "29731", "empty.py"],
        "import torch": [python, "-c", "import torch"],
        **{f"accel {name}": words for name, words in commands(python, accel).items()},
    }
    if args.peer:
        program = str(Path(args.peer).parent / "accelerate")
        lines |= {f"peer {name}": words for name, words in commands(args.peer, program).items()}
    folder = tempfile.mkdtemp()
    Path(folder, "empty.py").write_text("")
    times: dict[str, list[float]] = {name: [] for name in lines}
    try:
        for turn in range(args.rounds + 1):
            for name, words in lines.items():
                seconds = timed(words, folder)
                if turn:
                    times[name].append(seconds)
    finally:
        shutil.rmtree(folder)
    middle = {name: statistics.median(found) for name, found in times.items()}

    def over(name: str, base: str) -> float:
        return statistics.median(a - b for a, b in zip(times[name], times[base], strict=True))

    def row(who: str) -> dict[str, float]:
        plain = min("torchrun", "torchrun, fixed port", key=middle.__getitem__)
        return {
            "accel --help": middle[f"{who} --help"],
            "accel launch --help": middle[f"{who} launch --help"],
            "one process, over python": over(f"{who} one process", "python script.py"),
            "two processes, over torchrun": over(f"{who} two processes", plain),
            "accel env, over import torch": over(f"{who} env", "import torch"),
        }

    ours, theirs = row("accel"), row("peer") if args.peer else {}
    print(f"| what (median of {args.rounds}, s) | accel | accelerate 1.15.0 | target |\n|---|---|---|---|")
    for name, goal in GOALS.items():
        other = f"{theirs[name]:.2f}" if theirs else "-"
        print(f"| {name} | {ours[name]:.2f} | {other} | {goal} |")
    print("\nplain: " + ", ".join(f"{name} {middle[name]:.2f}" for name in list(lines)[:4]))


if __name__ == "__main__":
    main()
