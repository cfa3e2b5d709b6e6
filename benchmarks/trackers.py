"""What a logging call costs a training step, with healthy, slow and failing trackers.

    python benchmarks/trackers.py [--peer PYTHON] [--calls N]

A run logs two numbers a step to one tracker: one that keeps them in a list, one that takes 5 s for every call, one that
raises at every call, and torch's TensorBoard writer. Shown is the median time of a call of `Accelerator.log`, and how
many of the run's values the tracker has, or the file of what it did not take, at the end. "Direct" is the same call
made on the tracker. With --peer, that Python does the same with accelerate 1.15.0, with 2 calls where one takes
5 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SLEEP = 5.0


def trackers(base):
    """Make the three trackers as subclasses of a library's own base class."""

    class Listing(base):
        name = "listing"
        requires_logging_directory = False

        def __init__(self):
            super().__init__()
            self.values = []

        @property
        def tracker(self):
            return self.values

        def store_init_configuration(self, values):
            pass

        def log(self, values, step=None, **kwargs):
            self.values.append((step, values))

        def finish(self):
            pass

    class Slow(Listing):
        name = "slow"

        def log(self, values, step=None, **kwargs):
            time.sleep(SLEEP)
            super().log(values, step)

    class Failing(Listing):
        name = "failing"

        def log(self, values, step=None, **kwargs):
            raise ConnectionError("no network")

    return Listing, Slow, Failing


def measure(log, calls):
    """Return the median seconds of a call."""
    times = []
    for step in range(calls):
        begin = time.perf_counter()
        log({"loss": 0.5, "lr": 1e-3}, step=step)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def accel(calls):
    """Measure accel, and the trackers called directly."""
    import logging

    from accel_core.accelerator import Accelerator
    from accel_core.tracking.settings import TrackerKwargs
    from accel_core.tracking.tracker import GeneralTracker
    from accel_trackers import TensorBoardTracker

    logging.disable(logging.WARNING)
    rows = {}
    for kind in (*trackers(GeneralTracker), TensorBoardTracker):
        with tempfile.TemporaryDirectory() as folder:
            settings = TrackerKwargs(drain_seconds=1.0)
            built_in = kind is TensorBoardTracker
            tracker = "tensorboard" if built_in else kind()
            run = Accelerator(cpu=True, log_with=tracker, project_dir=folder, kwargs_handlers=[settings])
            run.init_trackers("run")
            seconds = measure(run.log, calls)
            run.end_training()
            direct = TensorBoardTracker("direct", folder) if built_in else kind()
            direct.start()
            kept = sum(len(path.read_text().splitlines()) for path in Path(folder).glob("undelivered-*.jsonl"))
            have = calls if built_in else len(tracker.values)
            try:
                alone = measure(direct.log, 1 if kind.name == "slow" else calls)
            except ConnectionError:
                alone = None
            rows[kind.name] = [seconds, alone, have, kept]
    return rows


def peer(calls):
    """Measure accelerate."""
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    rows = {}
    for kind in trackers(GeneralTracker):
        tracker = kind()
        run = Accelerator(cpu=True, log_with=tracker)
        run.init_trackers("run")
        try:
            seconds = measure(run.log, 2 if kind.name == "slow" else calls)
        except ConnectionError:
            seconds = None
        rows[kind.name] = [seconds, len(tracker.values)]
    return rows


def shown(seconds):
    """Write a time in the unit that suits it."""
    if seconds is None:
        return "raises"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e6:.0f} µs"


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python that has accelerate 1.15.0 installed")
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--work", choices=["accel", "peer"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(accel(args.calls) if args.work == "accel" else peer(args.calls)))
        return 0
    results = {}
    for who, python in (("accel", sys.executable), ("peer", args.peer)):
        if python:
            command = [python, __file__, "--work", who, "--calls", str(args.calls)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results[who] = json.loads(done.stdout.splitlines()[-1])
    titles = {
        "listing": "keeps values in a list",
        "slow": f"takes {SLEEP:.0f} s for every call",
        "failing": "raises at every call",
        "tensorboard": "TensorBoard's writer",
    }
    print("| tracker | accel, a call | direct, a call | accelerate 1.15.0, a call | accel: values kept |")
    print("|---|---|---|---|---|")
    for name, (seconds, alone, have, kept) in results["accel"].items():
        theirs = shown(results["peer"][name][0]) if "peer" in results and name in results["peer"] else "not measured"
        total = f"{have} in the tracker, {kept} in the file, of {args.calls}"
        print(f"| {titles[name]} | {shown(seconds)} | {shown(alone)} | {theirs} | {total} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
