"""One CUDA device: what works there, and how fast, beside plain PyTorch and accelerate 1.15.0.

    python benchmarks/gpu.py [--peer PYTHON] [--json FILE] [--only ROW ...] [--minutes 8.5] [--dry-run]

Needs no installation of this repository and no network: torch, numpy, safetensors, packaging, psutil and xxhash are
enough, and rows that need another library say that it is not there. The peer is accelerate 1.15.0 in this Python, or in
the one that --peer names; without it its column stays empty. Prints a table in Markdown and writes, with --json, the
figures with what they were measured on; `benchmarks/record.py gpu --taken FILE` puts that into RESULTS.md.

Every row runs in a process of its own: one that fails, hangs or takes the device's memory with it is reported in the
table, and the others go on. A row that no time is left for says so. Ends with status 1 when a row failed, 2 when there
is no CUDA device. With --dry-run, everything is small and runs on the simulated accelerator of the tests (needs g++ and
ninja), or on the CPU where that lacks what a row needs: it shows that the rows run, and no figure of it means anything.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PEER = "accelerate 1.15.0"
LEAST = 5.0
"""Seconds that have to be left for a row to begin."""


def rows() -> dict[str, Any]:
    """Return all rows by name, in the order of the table."""
    from gpu_rows import device, economy, offload, training

    return {row.name: row for module in (device, offload, training, economy) for row in module.ROWS}


# ---- one side: a process that has imported its library and forks one for each row ------------------------------


def measure(name: str, library: str, dry: bool, folder: Path, answer: Connection) -> None:
    """Be the process of one row: send its figures, or why there are none, and end at once."""
    os.setsid()  # so that whatever a row starts can be ended with it
    from gpu_rows.place import NotHere, Place

    row = rows()[name]
    try:
        if not dry and torch_is_spoilt():
            answer.send({"bad fork": True})
        else:
            place = Place.take(library, row.dry if dry else None, folder)
            answer.send({"figures": row.run(place), "on": str(place.device)})
    except NotHere as reason:
        answer.send({"not measured": str(reason)})
    except BaseException as failure:
        traceback.print_exc()
        answer.send({"failed": f"{type(failure).__name__}: {failure}"})
    sys.stderr.flush()
    os._exit(0)  # a device's library that is torn down with Python may abort


def torch_is_spoilt() -> bool:
    """Return whether this process was forked from one that had looked at the devices, so that CUDA fails here."""
    import torch

    return bool(torch.cuda._is_in_bad_fork())


def one(name: str, library: str, dry: bool, folder: Path, seconds: float, how: str = "fork") -> dict[str, Any]:
    """Run a row in a process of its own, for so many seconds at most; return what it sent."""
    context: Any = multiprocessing.get_context(how)
    receive, send = context.Pipe(duplex=False)
    folder.mkdir(parents=True)
    process = context.Process(target=measure, args=(name, library, dry, folder, send))
    process.start()
    send.close()
    found: dict[str, Any]
    try:
        found = receive.recv() if receive.poll(seconds) else {"failed": f"not done after {seconds:.0f} s"}
    except EOFError:
        process.join()
        found = {"failed": f"its process ended with status {process.exitcode}"}
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.join()
    shutil.rmtree(folder, ignore_errors=True)
    # Some library looked at the devices when it was imported: then a process has to begin anew, which takes longer.
    return found if "bad fork" not in found else one(name, library, dry, folder, seconds, "spawn")


def serve(library: str, dry: bool, folder: Path) -> None:
    """Measure the rows that stdin names, each with its seconds, and answer with a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a row prints is no answer
    import torch

    if library == "accel":
        pass
    else:
        import accelerate  # noqa: F401
    if dry:
        from gpu_rows.place import SIMULATED

        sys.path.insert(0, str(SIMULATED))
        import simulated

        simulated.build()
    print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda}), file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        name, seconds = line.split()
        begun = time.perf_counter()
        found = one(name, library, dry, folder / str(number), float(seconds))
        print(json.dumps({**found, "seconds": time.perf_counter() - begun}), file=answers, flush=True)


def search_path(library: str) -> str:
    """Return a PYTHONPATH: for accel this tree's packages, less the drop-in; then what is on it from elsewhere."""
    packages = HERE.parent / "packages"
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    elsewhere = [path for path in given if not Path(path).resolve().match("packages/*/src")]
    own = sorted(str(path) for path in packages.glob("*/src") if "accel-compat" not in path.parts)
    return os.pathsep.join([*(own if library == "accel" else []), *elsewhere])


class Side:
    """The process of one library."""

    def __init__(self, python: str, library: str, dry: bool, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": search_path(library), "PYTHONWARNINGS": "ignore"}
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looking for a device then leaves forks able to use it
        words = [python, __file__, "--serve", library, "--folder", str(folder), *(["--dry-run"] if dry else [])]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.facts = self.hear()

    def hear(self) -> dict[str, Any]:
        """Return the next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            return {"failed": f"the process of this library ended with status {self.process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def measure(self, name: str, seconds: float) -> dict[str, Any]:
        """Measure one row."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{name} {seconds:.0f}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # what it last said is the answer
        return self.hear()

    def end(self) -> None:
        """Let the process end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# ---- the table ---------------------------------------------------------------------------------------------------


def number(value: float, unit: str) -> str:
    """Write a figure with three digits that count."""
    digits = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{digits} {unit}".strip()


def cell(line: Any, found: dict[str, Any] | None, dry: bool) -> str:
    """Write what one library has to show on a line."""
    if found is None:
        return ""
    if "figures" not in found:
        kind = "not measured" if "not measured" in found else "failed"
        words = " ".join(str(found[kind]).split()).replace("|", "/")
        return f"{kind.upper() if kind == 'failed' else kind}: {words[:200]}"
    value = found["figures"].get(line.key)
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if dry:
        return "ran"
    limit = found["figures"].get(line.limit)
    return number(value, line.unit) + (f" ({value / limit:.2f} ×)" if limit else "")


def table(results: Sequence[dict[str, Any]], title: str, dry: bool) -> str:
    """Write all rows in Markdown."""
    known = rows()
    words = [f"| {title} | limit | accel | {PEER} | target |", "|---|---|---|---|---|"]
    for result in results:
        for line in known[result["row"]].lines:
            ours = result["accel"].get("figures", {})
            limit = "" if line.limit not in ours else "ran" if dry else number(ours[line.limit], line.unit)
            cells = [cell(line, result[side], dry) for side in ("accel", "peer")]
            words.append(f"| {line.words} | {limit} | {' | '.join(cells)} | {line.reach} |")
    return "\n".join(words)


def failures(results: Sequence[dict[str, Any]]) -> list[str]:
    """Name the rows that failed with our library."""
    return [result["row"] for result in results if "failed" in result["accel"]]


# ---- the machine -------------------------------------------------------------------------------------------------

DEVICE = """
import json, torch
found = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
print(json.dumps(None if found is None else [found.name, found.total_memory, torch.cuda.device_count()]))
"""
PEER_HOME = "import accelerate; print(accelerate.__version__, accelerate.__file__)"


def asked(python: str, program: str) -> str | None:
    """Return the last line that a short program prints in another process, without this repository on its path."""
    environment = {**os.environ, "PYTHONPATH": search_path("accelerate")}
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False, env=environment)
    return done.stdout.splitlines()[-1] if done.returncode == 0 and done.stdout.strip() else None


def peer_python(wanted: str | None) -> str | None:
    """Return a Python that has accelerate 1.15.0 itself, not the drop-in of this repository."""
    python = wanted or sys.executable
    version, _, home = (asked(python, PEER_HOME) or "").partition(" ")
    return python if version == "1.15.0" and str(HERE.parent) not in home else None


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the rows, ours and the peer's in turns, while there is time."""
    end = time.perf_counter() + 60 * options.minutes
    device = None if options.dry_run else json.loads(asked(sys.executable, DEVICE) or "null")
    if device is None and not options.dry_run:
        raise SystemExit(2)
    sides = {"accel": Side(sys.executable, "accel", options.dry_run, folder / "accel")}
    python = peer_python(options.peer)
    if python is not None:
        sides["peer"] = Side(python, "accelerate", options.dry_run, folder / "peer")
    results: list[dict[str, Any]] = []
    for name, row in rows().items():
        if name not in options.only:
            continue
        result: dict[str, Any] = {"row": name, "peer": None}
        for key, side in sides.items():
            if key == "peer" and not row.peer:
                continue
            left = end - time.perf_counter()
            if left < LEAST:
                result[key] = {"not measured": "the time was used up"}
                continue
            result[key] = side.measure(name, min(row.seconds, left))
            print(f"{name}, {key}: {result[key]}", file=sys.stderr, flush=True)
        results.append(result)
    for side in sides.values():
        side.end()
    title = described(device, sides["accel"].facts)
    return {
        "dry_run": options.dry_run,
        "day": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {title}, Python {platform.python_version()}",
        "failed": failures(results),
        "rows": results,
        "table": table(results, title, options.dry_run),
    }


def described(device: list[Any] | None, facts: dict[str, Any]) -> str:
    """Name the device and what drives it."""
    if device is None:
        return f"DRY RUN on a simulated accelerator: no figure of a GPU; torch {facts.get('torch')}"
    name, total, _ = device
    return f"{name}, {total / 2**30:.0f} GiB, torch {facts.get('torch')}, CUDA {facts.get('cuda')}"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=None, help="a Python that has accelerate 1.15.0; by default this one")
    parser.add_argument("--json", default=None, type=Path, help="a file for the figures")
    parser.add_argument("--only", nargs="+", default=list(rows()), choices=list(rows()), metavar="ROW")
    parser.add_argument("--minutes", type=float, default=8.5, help="time for everything")
    parser.add_argument("--directory", default=None, help="where checkpoints go; a temporary folder by default")
    parser.add_argument("--dry-run", action="store_true", help="try the rows, small, on the simulated accelerator")
    parser.add_argument("--serve", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=None, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.dry_run, options.folder)
        return 0
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        try:
            found = run(options, Path(folder))
        except SystemExit as ended:
            print("No CUDA device is here, so nothing was measured. Use --dry-run to try the rows.", file=sys.stderr)
            return int(ended.code or 0)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(found["table"])
    if found["failed"]:
        print(f"failed: {', '.join(found['failed'])}", file=sys.stderr)
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
