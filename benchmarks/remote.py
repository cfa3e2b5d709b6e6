"""Checkpoints in an object store on this machine, compared with the store's own client; every request failing once.

    python benchmarks/remote.py [--mib 256] [--rounds 3]

The server is moto's S3 API in a process of its own, so what it takes is in every figure, and no network. `save_state`
of a model and its AdamW state takes turns with s3fs, which it uses, and with boto3, for the same files, each with the
parts and threads that it takes by itself; compared is what each wrote per second, without the staging on disk, which
has its own row. Memory is the growth of the peak of resident memory over what was there before, less that of the same
save to a folder, or load from one.
The table of faults lets every request of a save over an older checkpoint, and of a load, fail in each way, once.
ACCEL_TEST_STORE=seaweedfs takes another server, and ACCEL_TEST_STORE=google prints that table alone, at gs://.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "packages" / "accel-core" / "tests" / "stores"))

WIDTH = 1024
MIB = 1 << 20


def serve(pipe: Any) -> None:
    """Run the server in this process until its parent ends."""
    from store_server import serving, settings

    with serving() as proxy:
        pipe.send((settings(proxy), proxy.upstream))
        pipe.recv()


@contextlib.contextmanager
def server() -> Iterator[dict[str, str]]:
    """Run the server in another process, and give the variables with which clients find it without the proxy."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    variables, port = here.recv()
    os.environ.update(variables | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"})
    import s3fs

    s3fs.S3FileSystem().mkdir("bucket")
    try:
        yield variables
    finally:
        here.send(None)
        process.join()


def build(mib: float) -> tuple[Any, Any, Any]:
    """Return an accelerator, and a model and an optimizer whose files take so many MiB."""
    import torch

    from accel_core.accelerator import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    count = max(1, round(mib * MIB / 3 / (WIDTH * WIDTH * 4)))
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return (accelerator, *accelerator.prepare(model, optimizer))


def resident(name: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith(name + ":")).split()[1])


def growth(call: Any) -> int:
    """Return by how much the peak of resident memory grew over what was there, in bytes."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    call()
    return resident("VmHWM") - before


def upload(mib: float, rounds: int) -> dict[str, float]:
    """Measure saves and what they leave in memory."""
    import boto3
    import s3fs

    from accel_core.checkpoint.remote.store import Store

    accelerator, _model, _optimizer = build(mib)
    fs, put_all = s3fs.S3FileSystem(), Store.put_all
    moved: list[tuple[int, float]] = []  # bytes and seconds

    def counted(self: Store, files: Mapping[Path, str]) -> None:
        begin = time.perf_counter()
        put_all(self, files)
        moved.append((sum(path.stat().st_size for path in files), time.perf_counter() - begin))

    Store.put_all = counted  # type: ignore[method-assign]
    client = boto3.client("s3")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "plain"
        accelerator.save_state(str(place))
        files = [path for path in sorted(place.iterdir()) if path.is_file()]
        nbytes = sum(path.stat().st_size for path in files)
        rates: dict[str, list[float]] = {"accel": [], "s3fs": [], "boto3": []}
        seconds = []
        for number in range(rounds + 1):  # the first one warms up
            for who in list(rates) if number % 2 else reversed(list(rates)):
                begin = time.perf_counter()
                if who != "accel":
                    for path in files:
                        name = f"{who}/{number}/{path.name}"
                        if who == "boto3":
                            client.upload_file(str(path), "bucket", name)
                        else:
                            fs.put_file(str(path), f"bucket/{name}")
                    rates[who].append(nbytes / MIB / (time.perf_counter() - begin))
                else:
                    moved.clear()
                    accelerator.save_state(f"s3://bucket/saved/{number}")
                    seconds.append(time.perf_counter() - begin)
                    size, taken = map(sum, zip(*moved, strict=True))
                    rates[who].append(size / MIB / taken)
    grown = {}
    with tempfile.TemporaryDirectory() as folder:
        for where in (f"{folder}/one", "s3://bucket/warm", f"{folder}/two", "s3://bucket/memory"):
            grown["save", where[:2]] = growth(lambda where=where: accelerator.save_state(where))  # type: ignore[misc]
            grown["load", where[:2]] = growth(lambda where=where: accelerator.load_state(where))  # type: ignore[misc]
    found = {who: statistics.median(each[1:]) for who, each in rates.items()}
    beyond = {what: (grown[what, "s3"] - grown[what, folder[:2]]) / MIB for what in ("save", "load")}
    return found | beyond | {"mib": nbytes / MIB, "seconds": statistics.median(seconds[1:])}


def child(*words: str) -> dict[str, float]:
    """Run a part of this file in a process of its own, and return what it prints last."""
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def faults() -> list[tuple[str, str, int, collections.Counter[str]]]:
    """Let every request of a save and of a load fail in every way, and count what came of it."""
    from small_run import build as small
    from small_run import save_when_told, set_to, stored
    from store_server import FAULTS, SCHEME, file_system, serving, settings

    from accel_core.checkpoint.remote import store
    from accel_core.checkpoint.save import save_state

    rows = []
    store._PAUSE = 0.0
    with serving() as proxy, tempfile.TemporaryDirectory() as folder:
        os.environ.update(settings(proxy))
        file_system()().mkdir("faults")
        address = f"{SCHEME}://faults/run"
        run = small(1.0)
        save_state(run, address)
        proxy.begin()
        stored(address)
        loading = len(proxy.seen)
        old = 1.0
        for fault in ("kill", "killed", *FAULTS):
            counts: collections.Counter[str] = collections.Counter()
            at = 0
            context = multiprocessing.get_context("spawn")
            here, there = context.Pipe()
            arguments = (address, folder, settings(proxy), there)
            killed = context.Process(target=save_when_told, args=arguments) if "kill" in fault else None
            if killed:
                killed.start()
            while True:
                new = old + 1.0
                if killed:
                    here.send(new)
                    proxy.begin(fault, at, process=here.recv())
                    here.send(None)
                    over = here.recv() == 0
                else:
                    set_to(run, new)
                    proxy.begin(fault, at)
                    save_state(run, address)
                    over = len(proxy.seen) <= at
                proxy.begin()
                found = stored(address)
                if over:
                    (old,) = found
                    break
                counts["old" if found == {old} else "new" if found == {new} else "mixed"] += 1
                (old,), at = found, at + 1
            if killed:
                here.send(None)
                killed.join()
            rows.append(("save", fault, at, counts))
        for fault in FAULTS:
            counts = collections.Counter()
            for at in range(loading):
                proxy.begin(fault, at)
                counts["loaded" if stored(address) == {old} else "wrong"] += 1
            rows.append(("load", fault, loading, counts))
        proxy.begin()
    return rows


WAYS = {
    "kill": "kill -9 before it arrives",
    "killed": "kill -9 after it was done",
    "500": "answered with 500",
    "reset": "connection reset before it arrives",
    "lost": "done, and its answer lost",
    "truncated": "half of its answer arrives",
    "delay": "delayed",
}


def measure(args: argparse.Namespace) -> None:
    """Print what uploads, memory and loads take."""
    with server():
        found = child("--mib", str(args.mib), "--rounds", str(args.rounds), "--upload")
    print(f"| what, checkpoint of {found['mib']:.0f} MiB | measured | target |\n|---|---|---|")
    rates = ", ".join(f"{who} {found[who]:.0f}" for who in ("accel", "s3fs", "boto3"))
    print(f"| upload, MiB/s | {rates} | – |")
    print(f"| upload ÷ s3fs | {found['accel'] / found['s3fs']:.2f} | ≥ 0.9 |")
    print(f"| upload ÷ boto3 | {found['accel'] / found['boto3']:.2f} | ≥ 0.9 |")
    print(f"| `save_state`, with staging and commit, s | {found['seconds']:.1f} | – |")
    print(f"| memory of a save beyond one to a folder, MiB | {found['save']:.0f} | ≤ 32 |")
    print(f"| memory of a load beyond one from a folder, MiB | {found['load']:.0f} | ≤ 32 |")


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", help="accepted, as every benchmark does; accelerate keeps no checkpoints in stores")
    parser.add_argument("--upload", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.upload:
        print(json.dumps(upload(args.mib, args.rounds)))
        return
    if os.environ.get("ACCEL_TEST_STORE") != "google":
        measure(args)
    print("\n| of | each request | requests | what is loaded afterwards |\n|---|---|---|---|")
    for what, fault, count, counts in faults():
        told = ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))
        print(f"| a {what} | {WAYS[fault]} | {count} | {told} |")


if __name__ == "__main__":
    main()
