"""What grows with the number of ranks and of files, with simulated ranks.

    python benchmarks/scale.py [--ranks 8 64 512 4096 100000] [--files 10 1000 100000] [--svg FILE]

One process is rank 0 of many: a fake process group answers every collective at once, for each other rank with what this
rank sent, or with its own rows of a shard, and a store of this script's own holds the keys, to whose counters each rank
adds what this one does. The files and lists that the others write in a save are there too. Counted is what goes through
group and store; timed is the work of this rank, without the time that the fakes take. What no simulation shows, and is
not here: the network, the waiting for the slowest rank, and a filesystem that all ranks write to at once. There is no
column of the peer: nothing here compares.

For each number of ranks a process of its own prepares a model of 8 linear layers for DistributedDataParallel, with an
optimizer and a loader of four samples a batch, trains, gathers, saves and loads; and one more has FSDP2 shard a layer
of as many rows. Manifests hold as many entries as a
checkpoint of so many files has. --svg is a drawing of the measured points; nothing is drawn beyond them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pickle
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "docs" / "site"))
import drawing

RANKS, FILES = (8, 64, 512, 4096, 100_000), (10, 100, 1000, 10_000, 100_000)
KIB, MIB = 2**10, 2**20
ON_A_MACHINE = 8
STEPS = 20
DIFFERENT = (b"SavePlan", b"MetadataIndex")
"""What is in the pickles of plans, and of what is noted of shards."""


def least(call: Callable[[], object], seconds: float = 0.5) -> float:
    """Return the least seconds of a call, tried until some time is over, but once at least."""
    begun, best = time.perf_counter(), math.inf
    while best == math.inf or time.perf_counter() - begun < seconds:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


# ---- one rank of many ----------------------------------------------------------------------------------------------


def store_that_counts(size: int) -> Any:
    """Make a store in this process's memory for so many ranks, of which each adds to a counter what this one does."""
    from datetime import timedelta

    from torch.distributed import HashStore, Store

    class Counting(Store):
        """A store of one process."""

        def __init__(self) -> None:
            super().__init__()
            self.inside = HashStore()
            self.calls = self.bytes = 0

        def clone(self) -> Store:
            return self

        def count(self, nbytes: int = 0) -> None:
            self.calls += 1
            self.bytes += nbytes

        def set(self, key: str, value: Any) -> None:
            self.count(len(key) + len(value))
            self.inside.set(key, value)

        def get(self, key: str) -> bytes:
            found = self.inside.get(key)
            self.count(len(key) + len(found))
            return found

        def add(self, key: str, amount: int) -> int:
            self.count(len(key) + 8)
            return self.inside.add(key, amount * size)

        def check(self, keys: list[str]) -> bool:
            self.count(sum(map(len, keys)))
            return self.inside.check(keys)

        def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=5)) -> None:
            self.count(sum(map(len, keys)))
            self.inside.wait(keys, timeout)

        def deleteKey(self, key: str) -> bool:  # noqa: N802  torch's name
            self.count(len(key))
            return self.inside.delete_key(key)

    return Counting()


def group_that_answers(size: int, store: Any) -> Any:
    """Join a group of so many ranks, of which this process is the first and the others answer at once.

    Returns:
        The group; `messages` and `received` count its collectives and the bytes that this rank gets by them, `reduced`
        those collectives that are reductions, and `seconds` is the time that answering took.
    """
    import torch
    import torch.distributed as dist

    from accel_core.comm.transport import Transport

    class Fake(dist.ProcessGroup):
        """A process group of one process."""

        def __init__(self) -> None:
            super().__init__(0, size)
            self.messages = self.received = self.reduced = 0
            self.seconds = 0.0
            self.theirs = b""
            self.sums: list[int] = []  # what the others add to the next sum of as many numbers

        def done(self, result: Any, received: int) -> Any:
            self.messages += 1
            self.received += received
            future = torch.futures.Future()
            future.set_result(result)
            return torch._C._distributed_c10d._create_work_from_future(future)

        def allreduce(self, tensors: Any, options: Any = None) -> Any:
            self.reduced += 1
            if self.theirs and tensors[0].dtype == torch.int64:
                tensors[0][:, -1] += 1  # of the digest of what ranks bring, which is another one on the others
            if len(self.sums) == tensors[0].numel() and tensors[0].dtype == torch.int64:
                tensors[0] += torch.tensor(self.sums)
                self.sums = []
            return self.done(tensors, _bytes_of(tensors))

        def allreduce_coalesced(self, tensors: Any, options: Any = None) -> Any:
            return self.allreduce(tensors)

        def broadcast(self, tensors: Any, options: Any = None) -> Any:
            if self.theirs and options.rootRank:  # what is too long for all of it to travel at once
                begun = time.perf_counter()
                tensors[0].copy_(torch.frombuffer(bytearray(self.theirs), dtype=torch.uint8))
                self.seconds += time.perf_counter() - begun
            return self.done(tensors, _bytes_of(tensors))

        def barrier(self, options: Any = None) -> Any:
            return self.done([], 0)

        def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
            begun = time.perf_counter()
            for received, sent in zip(outputs, inputs, strict=True):
                for each in received:
                    each.copy_(sent)
            self.seconds += time.perf_counter() - begun
            return self.done(outputs, _bytes_of(outputs))

        def gather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
            return self.allgather(outputs, inputs)

        def all_gather_single(self, output: Any, sent: Any, options: Any = None) -> Any:
            begun = time.perf_counter()
            rows = output.view(size, -1)
            rows[:] = sent.view(1, -1)
            answer_as_others(rows, self.theirs)
            self.seconds += time.perf_counter() - begun
            return self.done(output, output.nbytes)

        def reduce_scatter_single(self, output: Any, sent: Any, options: Any = None) -> Any:
            self.reduced += 1
            output.copy_(sent.view(size, -1)[0].view_as(output))
            return self.done(output, output.nbytes)

        _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

        def getBackendName(self) -> str:  # noqa: N802  torch's name
            return "answering"

        @property
        def group_name(self) -> str:
            return str(dist.distributed_c10d._world.pg_names[self])

        pg_name = group_name

    made, exchange = Fake(), Transport.exchange_bytes

    def exchange_bytes(self: Any, content: bytes | memoryview, message: Any) -> list[Any]:
        made.theirs = bytes(content) if of_shards(content) else b""
        received = exchange(self, content, message)
        made.theirs = b""
        return received

    Transport.exchange_bytes = exchange_bytes  # type: ignore[method-assign]
    let_others_write(size, made)
    let_others_differ(made)
    dist.Backend.register_backend("answering", lambda *_: made, devices=["cpu"])
    dist.init_process_group("answering", store=store, rank=0, world_size=size)
    return made


def let_others_write(size: int, group: Any) -> None:
    """Let the other ranks of a save write files like those of this one when it has written them, and their lists."""
    from accel_core.checkpoint import names
    from accel_core.checkpoint.save import Transaction

    write = Transaction._write

    def written(self: Transaction, *given: Any) -> list[Any]:
        found, begun = write(self, *given), time.perf_counter()
        own = [entry for entry in found if entry.name == names.random_states_name(0) or entry.name.endswith(".distcp")]
        staging, sizes = self.storage.staging, list[int]()
        (staging / names.LISTS_NAME).mkdir(exist_ok=True)
        for rank in range(1, size):
            theirs = [replace(each, name=_of_rank(each.name, rank), rank=rank) for each in own]
            for mine, each in zip(own, theirs, strict=True):
                if rank < ON_A_MACHINE:  # whose files are read; a file has no more than so many links
                    os.link(staging / mine.name, staging / each.name)
                else:
                    os.close(os.open(staging / each.name, os.O_CREAT | os.O_WRONLY))
                    os.truncate(staging / each.name, each.size)
            content = self._manifest(theirs).encode()
            (staging / names.list_name(rank)).write_bytes(content)
            sizes += [*(each.size for each in theirs), len(content)]
        group.sums = [len(sizes), sum(sizes)]
        group.seconds += time.perf_counter() - begun
        return found

    Transaction._write = written  # type: ignore[method-assign]


def _of_rank(name: str, rank: int) -> str:
    """Return the name under which another rank writes what this one writes."""
    return name.replace("states_0", f"states_{rank}").replace("__0_0", f"__{rank}_0")


def let_others_differ(group: Any) -> None:
    """Let plans of shards, and what is noted of them, be those of ranks of which each has the next row of a tensor."""
    from torch import Size

    from accel_core.comm import control

    def moved(value: Any, rank: int) -> Any:
        if isinstance(value, dict):
            return {key: moved(each, rank) for key, each in value.items()}
        if isinstance(value, list):
            return [moved(each, rank) for each in value]
        if isinstance(value, tuple) and not isinstance(value, Size):
            return tuple(moved(each, rank) for each in value)
        if type(value).__name__ == "SavePlan":
            return replace(value, items=moved(value.items, rank))
        if type(value).__name__ == "WriteItem" and value.tensor_data is not None:
            data = value.tensor_data
            chunk = replace(data.chunk, offsets=Size([rank, *data.chunk.offsets[1:]]))
            return replace(value, index=moved(value.index, rank), tensor_data=replace(data, chunk=chunk))
        if type(value).__name__ == "MetadataIndex" and value.offset:
            return replace(value, offset=Size([rank, *value.offset[1:]]))
        return value

    def differing(exchange: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def exchanged(*given: Any, **options: Any) -> list[Any]:
            found, begun = exchange(*given, **options), time.perf_counter()
            if of_shards(pickle.dumps(found[0])):
                found = [moved(each, rank) for rank, each in enumerate(found)]
            group.seconds += time.perf_counter() - begun
            return found

        return exchanged

    control.Channel.exchange = differing(control.Channel.exchange)  # type: ignore[method-assign]
    control.Channel.gather = differing(control.Channel.gather)  # type: ignore[method-assign]


def of_shards(content: bytes | memoryview) -> bool:
    """Return whether a pickle is of plans of shards, or of what is noted of them, which is another one on each rank."""
    return any(name in bytes(content) for name in DIFFERENT)


def answer_as_others(rows: Any, theirs: bytes) -> None:
    """Put into the rows of the other ranks what they bring: into frames, lengths, or contents."""
    import torch

    from accel_core.comm import transport

    if not theirs:
        return
    if rows.dtype == torch.int64:
        rows[1:] = len(theirs)
        return
    text = theirs
    if len(rows) <= transport._FRAMES_UPTO:
        header = bytes(transport.memory_of(rows[0, : transport._HEADER.size].contiguous()))
        text = header[:-8] + struct.pack("<Q", len(theirs)) + theirs
    rows[1:, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Traffic:
    """What goes through the group and the store in a block, and the seconds of this rank."""

    def __init__(self, group: Any, store: Any) -> None:
        self.group = group
        self.store = store

    def counted(self, call: Callable[[], object]) -> dict[str, float]:
        """Count and time a call."""
        group, store = self.group, self.store
        before = group.messages, group.reduced, group.received, store.calls, store.bytes, group.seconds
        begun = time.perf_counter()
        call()
        seconds = time.perf_counter() - begun
        after = group.messages, group.reduced, group.received, store.calls, store.bytes, group.seconds
        names = ("messages", "reduced", "received", "store calls", "store bytes", "answering")
        found = {name: then - first for name, first, then in zip(names, before, after, strict=True)}
        return {**found, "ms": 1e3 * (seconds - found.pop("answering"))}


def _bytes_of(argument: Any) -> int:
    import torch

    if isinstance(argument, torch.Tensor):
        return argument.nbytes
    return sum(map(_bytes_of, argument))


def one_rank(size: int, folder: Path) -> dict[str, float]:
    """Be rank 0 of so many; return what was counted and timed."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from accel_core.accelerator import Accelerator

    torch.set_num_threads(1)
    store = store_that_counts(size)
    traffic, figures = Traffic(group_that_answers(size, store), store), arithmetic(size)
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))  # torch imports much for the first one
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    data = TensorDataset(torch.randn(4 * size, 64))
    made: list[Any] = []

    def prepare() -> None:
        made.append(Accelerator(cpu=True))
        made.extend(made[0].prepare(layers, torch.optim.AdamW(layers.parameters()), DataLoader(data, batch_size=4)))

    found = {"prepare": traffic.counted(prepare)}
    accelerator, model, optimizer, _ = made
    assert accelerator.num_processes == size
    figures |= steps(accelerator, model, optimizer, traffic)
    tensor = torch.zeros(4, 64)
    number = itertools.count()
    calls: dict[str, Callable[[], object]] = {
        "gather": lambda: accelerator.gather(tensor),
        "wait": accelerator.wait_for_everyone,
        "save": lambda: accelerator.save_state(str(folder / f"state_{next(number)}")),
    }
    for name, call in calls.items():
        for _ in range(8 if name != "save" else 1):  # frames take their size, files their place
            call()
        turns = [traffic.counted(call) for _ in range(9 if name != "save" else 3)]
        found[name] = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
    found["load"] = traffic.counted(lambda: accelerator.load_state(str(folder / "state_3")))
    figures |= {f"{name} {key}": value for name, values in found.items() for key, value in values.items()}
    figures["memory MiB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / KIB
    return figures


def one_sharded_rank(size: int, folder: Path) -> dict[str, float]:
    """Be rank 0 of so many that FSDP2 shards a model over, of which each has a row of a layer."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from accel_core.accelerator import Accelerator
    from accel_parallel.plugin import FullyShardedDataParallelPlugin

    torch.set_num_threads(1)
    store = store_that_counts(size)
    traffic = Traffic(group_that_answers(size, store), store)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    made: list[Any] = []

    def prepare() -> None:
        layer = torch.nn.Linear(4, size, bias=False)
        made.append(Accelerator(cpu=True, fsdp_plugin=plugin))
        made.extend(made[0].prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)))

    found = {"prepare": traffic.counted(prepare)}
    accelerator, model, optimizer = made
    twin = fully_shard(torch.nn.Linear(4, size, bias=False), reshard_after_forward=True)
    x = torch.ones(4, 4)

    def step(own: Any, run: Callable[[Any], None]) -> None:
        for _ in range(STEPS):
            run(own(x).square().sum())
            optimizer.step()
            optimizer.zero_grad()

    step(model, accelerator.backward), step(twin, lambda loss: loss.backward())
    ours = traffic.counted(lambda: step(model, accelerator.backward))
    plain = traffic.counted(lambda: step(twin, lambda loss: loss.backward()))
    for number, name in enumerate(("first save", "second save", "third save")):
        found[name] = traffic.counted(lambda number=number: accelerator.save_state(str(folder / f"state_{number}")))
    figures = {f"sharded {name} {key}": value for name, values in found.items() for key, value in values.items()}
    return figures | {"sharded step messages over FSDP2": ours["messages"] - plain["messages"]}


def steps(accelerator: Any, model: Any, optimizer: Any, traffic: Traffic) -> dict[str, float]:
    """Train some steps; every collective in them has to be one that DistributedDataParallel makes of the gradients."""
    import torch

    x = torch.ones(4, 64)

    def step(run: Callable[[Any], None]) -> None:
        with accelerator.accumulate(model):
            run(model(x).square().sum())
            optimizer.step()
            optimizer.zero_grad()

    def ours() -> None:
        for _ in range(STEPS):
            step(accelerator.backward)

    twin = torch.nn.parallel.DistributedDataParallel(accelerator.unwrap_model(model))

    def plain() -> None:
        for _ in range(STEPS):
            twin(x).square().sum().backward()

    ours(), plain()
    ours_found, plain_found = traffic.counted(ours), traffic.counted(plain)
    control = ours_found["messages"] - ours_found["reduced"] + ours_found["store calls"]
    return {
        "step control messages": control,
        "step reductions over DDP": ours_found["reduced"] - plain_found["reduced"],
        "step reductions": ours_found["reduced"],
    }


def arithmetic(size: int) -> dict[str, float]:
    """Time which rank does what, and which rank reads what: rank `size - 1` of a mesh of replicas and shards."""
    from torch.utils.data import BatchSampler

    from accel_core.data.samplers import BatchSamplerShard, SeedableRandomSampler
    from accel_core.mesh.layout import Layout

    inner = min(8, size)
    sizes = {"dp_replicate": size // inner, "dp_shard": inner}

    def lay_out() -> None:
        layout = Layout.of(size - 1, size, sizes)
        assert len(layout.parts) == layout.replicas == len(layout.readers)
        assert len(layout.group("dp_replicate")) == size // inner

    sampler = SeedableRandomSampler(range(4 * size * STEPS), data_seed=0)
    shard = BatchSamplerShard(BatchSampler(sampler, 4, drop_last=False), size, size - 1)
    times: list[float] = []
    for _ in range(5):
        batches = iter(shard)
        next(batches)  # draws the order
        begun = time.perf_counter()
        for _ in range(STEPS - 1):
            next(batches)
        times.append((time.perf_counter() - begun) / (STEPS - 1))

    return {"layout ms": 1e3 * least(lay_out), "shard us a step": 1e6 * min(times)}


# ---- manifests -----------------------------------------------------------------------------------------------------


def manifest(count: int, folder: Path) -> dict[str, float]:
    """Write and read the manifest of a checkpoint of so many files."""
    from accel_core.checkpoint.digest import digest_of_bytes
    from accel_core.checkpoint.manifest import Entry, Manifest, versions
    from accel_core.checkpoint.names import MANIFEST_NAME

    entries = [
        Entry(f"random_states_{number}.pkl", 14_000 + number, digest_of_bytes(str(number).encode()), number)
        for number in range(count)
    ]
    made = Manifest(tuple(sorted(entries, key=lambda entry: entry.name)), count, versions(), save="0" * 16)
    path = folder / MANIFEST_NAME

    def write() -> None:
        path.unlink(missing_ok=True)
        made.write(folder)

    seconds = 1.0 if count < FILES[-1] else 0.0
    written = least(write, seconds)
    read = least(lambda: Manifest.read(folder), seconds)
    assert Manifest.read(folder) == made
    return {"bytes": path.stat().st_size, "write ms": 1e3 * written, "read ms": 1e3 * read}


# ---- table and curves ----------------------------------------------------------------------------------------------

LINES = (
    ("`prepare`: this rank's time", "prepare ms", "ms"),
    ("… messages", "prepare messages", ""),
    ("… calls of the store", "prepare store calls", ""),
    ("control messages in 20 steps", "step control messages", ""),
    ("reductions in 20 steps", "step reductions", ""),
    ("… more than under plain DistributedDataParallel", "step reductions over DDP", ""),
    ("layout of the mesh: parts, readers, one group", "layout ms", "ms"),
    ("which samples: arithmetic of a step, four samples a batch", "shard us a step", "µs"),
    ("`gather` of 1 KiB: this rank's time", "gather ms", "ms"),
    ("… this rank receives", "gather received", "bytes"),
    ("`wait_for_everyone`: this rank's time", "wait ms", "ms"),
    ("… this rank receives", "wait received", "bytes"),
    ("`save_state`: this rank's time", "save ms", "ms"),
    ("… messages", "save messages", ""),
    ("… this rank receives", "save received", "bytes"),
    ("… through the store", "save store bytes", "bytes"),
    ("`load_state` of it: this rank's time", "load ms", "ms"),
    ("… this rank receives", "load received", "bytes"),
    ("growth of this rank's memory by all of it", "memory MiB", "MiB"),
    ("FSDP2: messages in `prepare`", "sharded prepare messages", ""),
    ("… messages in 20 steps more than under plain `fully_shard`", "sharded step messages over FSDP2", ""),
    ("… first `save_state`: this rank receives", "sharded first save received", "bytes"),
    ("… second one: this rank's time", "sharded second save ms", "ms"),
    ("… messages", "sharded second save messages", ""),
    ("… this rank receives", "sharded second save received", "bytes"),
)


def written(value: float | None, unit: str) -> str:
    """Write a figure."""
    if value is None:
        return "not measured"
    if unit == "bytes":
        for name, step in (("MiB", MIB), ("KiB", KIB)):
            if value >= step:
                return f"{value / step:,.1f} {name}"
    return f"{value:,.0f} {unit}".strip() if value >= 100 or not unit or value == 0 else f"{value:.3g} {unit}"


def growth(values: Sequence[float | None], sizes: Sequence[int]) -> str:
    """Return the exponent between the last two sizes: 0 where it stays, 1 where it grows as the ranks do."""
    if len(values) < 2 or not values[-1] or not values[-2]:
        return ""
    return f"{math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2]):.1f}"


def table(by_ranks: dict[int, dict[str, float]], by_files: dict[int, dict[str, float]]) -> str:
    """Write both tables in Markdown."""
    lines = [f"| rank 0 of | {' | '.join(f'{size:,}' for size in by_ranks)} | exponent of the last step |"]
    lines.append("|---" * (len(by_ranks) + 2) + "|")
    for words, key, unit in LINES:
        values = [found.get(key) for found in by_ranks.values()]
        cells = " | ".join(written(value, unit) for value in values)
        lines.append(f"| {words} | {cells} | {growth(values, list(by_ranks))} |")
    lines += ["", f"| manifest of … files | {' | '.join(f'{count:,}' for count in by_files)} | exponent |"]
    lines.append("|---" * (len(by_files) + 2) + "|")
    for words, key, unit in (("bytes", "bytes", "bytes"), ("write and flush", "write ms", "ms"),
                             ("read and check", "read ms", "ms")):  # fmt: skip
        values = [found[key] for found in by_files.values()]
        cells = " | ".join(written(value, unit) for value in values)
        lines.append(f"| {words} | {cells} | {growth(values, list(by_files))} |")
    return "\n".join(lines)


def svg(by_ranks: dict[int, dict[str, float]], by_files: dict[int, dict[str, float]]) -> str:
    """Draw what was measured: times and bytes by ranks, and manifests by files."""

    def of(found: dict[int, dict[str, float]], key: str, factor: float = 1.0) -> list[tuple[float, float]]:
        return [(float(size), figures[key] * factor) for size, figures in found.items() if figures.get(key)]

    panels = [
        drawing.panel("one rank's time, ms", "ranks", {
            "prepare": of(by_ranks, "prepare ms"), "save_state": of(by_ranks, "save ms"),
            "gather of 1 KiB": of(by_ranks, "gather ms"), "layout": of(by_ranks, "layout ms"),
            "sharding, a step": of(by_ranks, "shard us a step", 1e-3)}, 0, 0),
        drawing.panel("one rank receives, KiB", "ranks", {
            "gather of 1 KiB": of(by_ranks, "gather received", 1 / KIB),
            "save_state": of(by_ranks, "save received", 1 / KIB),
            "second save_state, FSDP2": of(by_ranks, "sharded second save received", 1 / KIB)}, drawing.WIDTH, 0),
        drawing.panel("manifest, ms", "files", {
            "write and flush": of(by_files, "write ms"), "read and check": of(by_files, "read ms")}, 0, drawing.HEIGHT),
        drawing.panel("manifest, KiB", "files", {
            "size": of(by_files, "bytes", 1 / KIB)}, drawing.WIDTH, drawing.HEIGHT),
    ]  # fmt: skip
    return drawing.picture("\n".join(panels), 2 * drawing.WIDTH, 2 * drawing.HEIGHT + 10, paper=True)


def separate(task: str, number: int) -> dict[str, float]:
    """Measure one number of ranks or files in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--task", task, "--number", str(number), "--folder", folder]
        env = {**os.environ, "PYTHONWARNINGS": "ignore", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        env |= {"LOCAL_WORLD_SIZE": str(min(number, ON_A_MACHINE))} if task != "files" else {}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure, print the tables, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=None, help="not used: a simulated rank of it would show nothing")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--files", nargs="+", type=int, default=FILES)
    parser.add_argument("--turns", type=int, default=3, help="processes for each number; shown is their median")
    parser.add_argument("--svg", type=Path, help="draw the curves; docs/concepts/scale.svg shows those of the defaults")
    parser.add_argument("--task", choices=["ranks", "sharded", "files"], help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        measure = {"ranks": one_rank, "sharded": one_sharded_rank, "files": manifest}[options.task]
        print(json.dumps(measure(options.number, options.folder)), flush=True)
        os._exit(0)  # the fake group is no group that could be left

    def medians(task: str, number: int) -> dict[str, float]:
        try:
            turns = [separate(task, number) for _ in range(options.turns)]
        except subprocess.CalledProcessError as error:
            sys.stderr.write(f"{task} {number} is not measured: {error}\n")
            return {}
        return {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}

    by_ranks = {size: medians("ranks", size) | medians("sharded", size) for size in options.ranks}
    by_files = {count: medians("files", count) for count in options.files}
    if options.svg:
        options.svg.write_text(svg(by_ranks, by_files))
    print(table(by_ranks, by_files))


if __name__ == "__main__":
    main()
