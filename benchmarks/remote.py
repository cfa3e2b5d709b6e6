"""Checkpoints in an object store on this machine, compared with the store's own client; every request failing once.

    python benchmarks/remote.py [--mib 256] [--rounds 3]

The server is moto's S3 API in a process of its own, so what it takes is in every figure, and no network. `save_state`
of a model and its AdamW state takes turns with s3fs, which it uses, and with boto3, for the same files, with parts of
the same size and as many under way; compared is what each wrote per second, without the staging on disk, which has its
own row. Memory is the growth of the peak of resident memory over what was there before, less that of the same save to a
folder, or load from one.
What ranks fetch is what each of four says it fetched of a checkpoint that one rank saved, over a quarter of the files;
and of one that they saved in shards, where each is on a machine of its own.
Weights that stay are those of a model on "disk", which its forwards fetch.
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
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "packages" / "accel-core" / "tests" / "stores"))

WIDTH = 1024
RANKS = 4
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
    from boto3.s3.transfer import TransferConfig

    from accel_core.checkpoint import traffic
    from accel_core.checkpoint.remote import store

    accelerator, _model, _optimizer = build(mib)
    fs = s3fs.S3FileSystem()
    written: list[traffic.Traffic] = []
    made = store.Traffic

    def counted() -> traffic.Traffic:
        written.append(made())
        return written[-1]

    store.Traffic = counted  # type: ignore[misc,assignment]
    client = boto3.client("s3")
    config = TransferConfig(
        multipart_threshold=store.PART, multipart_chunksize=store.PART, max_concurrency=store.PARALLEL
    )
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
                            client.upload_file(str(path), "bucket", name, Config=config)
                        else:
                            fs.put_file(
                                str(path), f"bucket/{name}", chunksize=store.PART, max_concurrency=store.PARALLEL
                            )
                    rates[who].append(nbytes / MIB / (time.perf_counter() - begin))
                else:
                    written.clear()
                    accelerator.save_state(f"s3://bucket/saved/{number}")
                    seconds.append(time.perf_counter() - begin)
                    moved = [each for each in written if each.files]
                    rates[who].append(sum(each.bytes for each in moved) / MIB / sum(each.seconds for each in moved))
    store.Traffic = made  # type: ignore[misc]
    grown = {}
    with tempfile.TemporaryDirectory() as folder:
        for where in (f"{folder}/one", "s3://bucket/warm", f"{folder}/two", "s3://bucket/memory"):
            grown["save", where[:2]] = growth(lambda where=where: accelerator.save_state(where))  # type: ignore[misc]
            grown["load", where[:2]] = growth(lambda where=where: accelerator.load_state(where))  # type: ignore[misc]
    found = {who: statistics.median(each[1:]) for who, each in rates.items()}
    beyond = {what: (grown[what, "s3"] - grown[what, folder[:2]]) / MIB for what in ("save", "load")}
    return found | beyond | {"mib": nbytes / MIB, "seconds": statistics.median(seconds[1:])}


def fetch(mib: float) -> dict[str, float]:
    """Load on a rank, and say how much it fetched."""
    accelerator, _, _ = build(mib)
    report = accelerator.load_state("s3://bucket/memory")
    moved = accelerator.gather(__import__("torch").tensor([float(report.traffic.bytes)])).tolist()
    return {"fetched": max(moved), "all": sum(moved)}


def shards(mib: float) -> dict[str, float]:
    """Save in shards on ranks of which each is a machine, load, and say how much one fetched and how much there is."""
    rank = os.environ["RANK"]
    os.environ.update({"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    tempfile.tempdir = tempfile.mkdtemp(suffix=rank)
    import s3fs
    import torch

    from accel_core.accelerator import Accelerator
    from accel_parallel.plugin import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    count = max(1, round(mib * MIB / 3 / (WIDTH * WIDTH * 4)))
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, WIDTH)).sum())
    optimizer.step()
    accelerator.save_state("s3://bucket/shards")
    traffic = accelerator.load_state("s3://bucket/shards").traffic
    assert traffic is not None
    moved = accelerator.gather(torch.tensor([float(traffic.bytes)])).tolist()
    shutil.rmtree(tempfile.tempdir)
    return {"fetched": max(moved), "all": float(s3fs.S3FileSystem().du("bucket/shards"))}


def stay(mib: float) -> dict[str, float]:
    """Run layers that stay in the store, and say what loads and forwards fetched; all of them fit a cache, or half."""
    import torch

    from accel_bigmodel import load_checkpoint_and_dispatch
    from accel_bigmodel.checkpoint.load import loading_index
    from accel_bigmodel.offload.pieces import away
    from accel_core.checkpoint.weights import save_model

    count = max(4, round(mib * MIB / (WIDTH * WIDTH * 4)))
    nbytes, inputs = count * WIDTH * WIDTH * 4, torch.ones(8, WIDTH)

    def layers() -> torch.nn.Module:
        return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)])

    save_model(layers(), None, "s3://bucket/weights")
    found = {"model": float(nbytes)}
    for name, cache in (("all", nbytes), ("half", nbytes // 2)):
        with torch.device("meta"):
            model = layers()
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            model = load_checkpoint_and_dispatch(
                model, "s3://bucket/weights", device_map={"": "disk"}, offload_folder=folder, offload_cache=cache
            )
            at = away(next(iter(loading_index(model).values()))["safetensors_file"])
            assert at is not None
            moved = [at.file.store.traffic.bytes]
            for _ in range(3):
                model(inputs)
                moved.append(at.file.store.traffic.bytes)
        found |= {f"{name} load": moved[0], f"{name} first": moved[1] - moved[0], f"{name} third": moved[3] - moved[2]}
    return found


def child(*words: str, ranks: int = 1) -> dict[str, float]:
    """Run a part of this file in processes of its own, and return what the first one prints last."""
    command = [sys.executable, *(["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else [])]
    done = subprocess.run([*command, __file__, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
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
            arguments = (address, run.project.run_id, folder, settings(proxy), there)
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
    words = ("--mib", str(args.mib), "--rounds", str(args.rounds))
    with server():
        found = child(*words, "--part", "upload")
        four = child(*words, "--part", "fetch", ranks=RANKS)
        apart = child(*words, "--part", "shards", ranks=RANKS)
        stays = child(*words, "--part", "stay")
    share = found["mib"] * MIB / RANKS
    print(f"| what, checkpoint of {found['mib']:.0f} MiB | measured | target |\n|---|---|---|")
    rates = ", ".join(f"{who} {found[who]:.0f}" for who in ("accel", "s3fs", "boto3"))
    print(f"| upload, MiB/s | {rates} | – |")
    print(f"| upload ÷ s3fs with the same parts | {found['accel'] / found['s3fs']:.2f} | ≥ 0.9 |")
    print(f"| upload ÷ boto3 with the same parts | {found['accel'] / found['boto3']:.2f} | ≥ 0.9 |")
    print(f"| `save_state`, with staging and commit, s | {found['seconds']:.1f} | – |")
    print(f"| memory of a save beyond one to a folder, MiB | {found['save']:.0f} | ≤ 32 |")
    print(f"| memory of a load beyond one from a folder, MiB | {found['load']:.0f} | ≤ 32 |")
    print(f"| bytes fetched by one of {RANKS} ranks ÷ its share | {four['fetched'] / share:.3f} | ≤ 1.05 |")
    alone = apart["fetched"] / (apart["all"] / RANKS)
    print(f"| … each on a machine of its own, of shards that they saved | {alone:.3f} | ≤ 1.05 |")
    size, loaded = stays["model"] / MIB, stays["all load"] / 1024
    print(f"| weights that stay, {size:.0f} MiB: fetched by the load, KiB | {loaded:.1f} | – |")
    for cache in ("all", "half"):
        moved = ", ".join(f"{stays[f'{cache} {which}'] / MIB:.0f}" for which in ("first", "third"))
        print(f"| … fetched by the first and third forward, cache for {cache}, MiB | {moved} | – |")


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", help="accepted, as every benchmark does; accelerate keeps no checkpoints in stores")
    parser.add_argument("--part", choices=("upload", "fetch", "shards", "stay"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        parts = {"upload": lambda mib: upload(mib, args.rounds), "fetch": fetch, "shards": shards, "stay": stay}
        result = parts[args.part](args.mib)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(result))
        return
    if os.environ.get("ACCEL_TEST_STORE") != "google":
        measure(args)
    print("\n| of | each request | requests | what is loaded afterwards |\n|---|---|---|---|")
    for what, fault, count, counts in faults():
        told = ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))
        print(f"| a {what} | {WAYS[fault]} | {count} | {told} |")


if __name__ == "__main__":
    main()
