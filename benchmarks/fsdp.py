"""Sharded training on two ranks, beside hand-written fully_shard and FullyShardedDataParallel.

    python benchmarks/fsdp.py [--gib SIZE] [--only ROW]

Two gloo ranks. Steps (forward, backward, clip, optimizer) of one run and of torch's own calls take turns; shown is the
median of paired ratios. Added host time is the median of paired differences of a step of a small model, one process.
Memory is the peak of a rank's resident memory above what it was before the model was made. The weights that are loaded
and saved are SIZE GiB (1.6); "read" is one process that reads the file, "by hand" torch's full state dict on rank 0 and
safetensors' own writer. A state to save and load is that of a model of an eighth of SIZE and of AdamW, in shards, by
`save_state` and `load_state`, and by torch's `get_state_dict`, `dcp.save`, `dcp.load` and `set_state_dict`, flushed to
disk, in turns; "standstill" is how long `save_state(blocking=False)` keeps the ranks from their next step. Accelerate
1.15.0 is no column: on a CPU it does not train sharded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from pathlib import Path

from side_by_side import added_microseconds, on_ranks, paired_seconds, report

ROUNDS, STEPS, WIDTH, LAYERS, BATCH = 14, 4, 256, 6, 32
MIB = 2**20


def model(width, layers):
    """Return a list of equal blocks behind one another."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

        def forward(self, x):
            return x + self.down(self.up(x).relu())

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = torch.nn.ModuleList(Block() for _ in range(layers)), torch.nn.Linear(width, 10)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    return Net()


def by_hand(version, net):
    """Shard a model by torch's own calls; return it, its optimizer and how its gradients are clipped."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    if version == 2:
        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
        clip = lambda: torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # noqa: E731
    else:
        policy = ModuleWrapPolicy({type(net.blocks[0])})
        net = FullyShardedDataParallel(
            net, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
        clip = lambda: net.clip_grad_norm_(1.0)  # noqa: E731
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3), clip


def prepared(version, net, kind="FULL_STATE_DICT"):
    """Return an Accelerator, and the model and optimizer that it prepared."""
    import torch

    from accel_core.accelerator import Accelerator
    from accel_parallel.plugin import FullyShardedDataParallelPlugin

    first = {"use_orig_params": True, "backward_prefetch": "BACKWARD_PRE"} if version == 1 else {}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind, **first)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    return accelerator, *accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))


def loops(version, width, layers, batch):
    """Return a step by hand and the accelerated one, of equal models."""
    import torch

    x, y = torch.randn(batch, width), torch.randint(10, (batch,))
    accelerator, net, optimizer = prepared(version, model(width, layers))
    hand, hand_optimizer, clip = by_hand(version, model(width, layers))

    def plain():
        torch.nn.functional.cross_entropy(hand(x), y).backward()
        clip()
        hand_optimizer.step()
        hand_optimizer.zero_grad()

    def accelerated():
        with accelerator.accumulate(net):
            accelerator.backward(torch.nn.functional.cross_entropy(net(x), y))
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return plain, accelerated


def steps(version):
    """Return the ratio of steps a second."""
    times = paired_seconds(*loops(version, WIDTH, LAYERS, BATCH), ROUNDS, STEPS)
    return statistics.median(hand / ours for hand, ours in times)


def host(version):
    """Return the microseconds that a step of a small model costs more, in one process."""
    return added_microseconds(*loops(version, 8, 4, 2), 400)


def peak():
    """Return the largest resident memory since `forget_peak`, in bytes."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def forget_peak():
    """Begin a new peak; return the resident memory now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def memory(version, side):
    """Return the peak of a few steps on this rank."""
    import torch

    build = {"hand": by_hand, "accel": prepared}[side]
    if side == "hand":
        torch.distributed.init_process_group("gloo")
    before = forget_peak()
    plain_or_accelerated = build(version, model(1024, 6))
    x, y = torch.randn(16, 1024), torch.randint(10, (16,))
    for _ in range(3):
        if side == "hand":
            net, optimizer, clip = plain_or_accelerated
            torch.nn.functional.cross_entropy(net(x), y).backward()
            clip()
        else:
            accelerator, net, optimizer = plain_or_accelerated
            accelerator.backward(torch.nn.functional.cross_entropy(net(x), y))
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return peak() - before


def sized(gib):
    """Return width and layers of a model of so many GiB."""
    width = 1024
    return width, round(gib * 2**30 / (8 * width * width * 4))


def load(version, gib, folder):
    """Return what loading on rank 0 alone took: seconds, and this rank's peak."""
    import torch
    import torch.distributed as dist

    from accel_core.accelerator import Accelerator
    from accel_core.checkpoint.weights import load_model
    from accel_parallel.plugin import FullyShardedDataParallelPlugin

    first = {"use_orig_params": True} if version == 1 else {}
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=version, cpu_ram_efficient_loading=True, **first),
    )
    accelerator.prepare(model(8, 1))  # imports torch's FSDP, which is no part of loading
    with torch.device("meta"):
        net = model(*sized(gib))
    dist.barrier()
    before, begun = forget_peak(), time.perf_counter()
    if accelerator.is_main_process:
        net.to_empty(device="cpu")
        load_model(net, Path(folder))
    net = accelerator.prepare(net)
    dist.barrier()
    return time.perf_counter() - begun, peak() - before


def save(version, gib, folder, side):
    """Return what writing the whole model took: seconds, and this rank's peak."""
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    accelerator, net, _ = prepared(version, model(*sized(gib)))
    dist.barrier()
    before, begun = forget_peak(), time.perf_counter()
    if side == "accel":
        accelerator.save_model(net, Path(folder) / "model")
    else:
        state = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=version == 2))
        if accelerator.is_main_process:
            save_file(state, Path(folder) / "by_hand.safetensors")
    dist.barrier()
    return time.perf_counter() - begun, peak() - before


def read(gib, folder):
    """Return the seconds that reading the weights once takes."""
    import torch
    from safetensors.torch import load_file

    if not (Path(folder) / "model.safetensors").exists():
        from safetensors.torch import save_file

        save_file(model(*sized(gib)).state_dict(), Path(folder) / "model.safetensors")
    begun = time.perf_counter()
    sum(float(value.sum()) for value in map(torch.Tensor.clone, load_file(Path(folder) / "model.safetensors").values()))
    return time.perf_counter() - begun


def state(version, gib, folder):
    """Return what saving and loading a state in shards took beside torch's own calls, and how long runs stood still."""
    import shutil
    import warnings

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    warnings.simplefilter("ignore")
    accelerator, net, optimizer = prepared(version, model(*sized(gib / 8)), "SHARDED_STATE_DICT")
    torch.nn.functional.cross_entropy(net(torch.randn(2, 1024)), torch.tensor([0, 1])).backward()
    optimizer.step()
    optimizer.zero_grad()
    ours, by_torch = Path(folder) / "ours", Path(folder) / "by_torch"

    def save_by_torch():
        weights, of_optimizer = get_state_dict(net, optimizer.optimizer)
        dcp.save({"model": weights, "optimizer": of_optimizer}, checkpoint_id=by_torch)

    def load_by_torch():
        weights, of_optimizer = get_state_dict(net, optimizer.optimizer)
        content = {"model": weights, "optimizer": of_optimizer}
        dcp.load(content, checkpoint_id=by_torch)
        set_state_dict(
            net, optimizer.optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"]
        )

    def timed(act):
        dist.barrier()
        if accelerator.is_main_process:
            os.sync()
        dist.barrier()
        begun = time.perf_counter()
        act()
        dist.barrier()
        return time.perf_counter() - begun

    def in_turns(first, second, between=lambda: None):
        times = {first: [], second: []}
        for turn in range(5):
            for act in (first, second) if turn % 2 else (second, first):
                between()
                times[act].append(timed(act))
        pairs = list(zip(times[first], times[second], strict=True))[1:]
        return statistics.median(ours / theirs for ours, theirs in pairs), statistics.median(one for one, _ in pairs)

    def nothing_there():
        dist.barrier()
        if accelerator.is_main_process:
            shutil.rmtree(ours, ignore_errors=True)
            shutil.rmtree(by_torch, ignore_errors=True)

    saving, seconds = in_turns(lambda: accelerator.save_state(str(ours)), save_by_torch, nothing_there)
    accelerator.save_state(str(ours))
    save_by_torch()
    loading, _ = in_turns(lambda: accelerator.load_state(str(ours)), load_by_torch)
    stalls = []
    handles = []
    for _ in range(4):
        stalls.append(timed(lambda: handles.append(accelerator.save_state(str(ours), blocking=False))))
        handles.pop().wait()
    return saving, loading, statistics.median(stalls[1:]) / seconds


WORK = {function.__name__: function for function in (steps, host, memory, load, save, state, read)}


def ranks(size, name, *arguments):
    """Run a measurement on some ranks and return what each found."""
    # glibc keeps no freed block, which would count as used
    return on_ranks(__file__, size, name, *arguments, MALLOC_MMAP_THRESHOLD_=str(MIB))


def rows_of_steps(version, gib):
    """Yield the rows of steps."""
    yield "steps/s ÷ by hand", f"{ranks(2, 'steps', version)[0]:.3f}", "≥ 0.98"


def rows_of_host(version, gib):
    """Yield the row of the time that a step costs more."""
    yield "added host time per step, µs", f"{ranks(1, 'host', version)[0]:.0f}", "≤ 60"


def rows_of_memory(version, gib):
    """Yield the row of memory."""
    hand, ours = (max(ranks(2, "memory", version, side)) for side in ("hand", "accel"))
    yield "peak memory ÷ by hand", f"{ours / hand:.3f}", "≤ 1.02"


def rows_of_load(version, gib):
    """Yield the rows of loading on one rank."""
    width, layers = sized(gib)
    block = 8 * width * width * 4
    with tempfile.TemporaryDirectory() as folder:
        reading = statistics.median(ranks(1, "read", gib, folder)[0] for _ in range(3))
        (seconds, _), (_, other) = ranks(2, "load", version, gib, folder)
    bound = layers * block / 2 + 2 * block
    yield f"load {gib} GiB: peak on rank 1 ÷ (its shard + 2 blocks)", f"{other / bound:.2f}", "≤ 1"
    yield f"load {gib} GiB: time ÷ reading the file", f"{seconds / reading:.2f}", "≤ 1.3"


def rows_of_save(version, gib):
    """Yield the rows of writing the whole model."""
    width = sized(gib)[0]
    largest = 4 * width * width * 4
    with tempfile.TemporaryDirectory() as folder:
        (by_torch, _), _ = ranks(2, "save", version, gib, folder, "hand")
        (seconds, _), (_, other) = ranks(2, "save", version, gib, folder, "accel")
    yield (
        "save_model: peak on rank 1 beyond its shard, MiB",
        f"{other / MIB:.0f}",
        f"≤ {largest / MIB:.0f}",
    )
    yield "save_model: time ÷ full state dict + write", f"{seconds / by_torch:.2f}", "≤ 1.15"


def rows_of_state(version, gib):
    """Yield the rows of saving and loading a state in shards."""
    with tempfile.TemporaryDirectory() as folder:
        saving, loading, standstill = ranks(2, "state", version, gib, folder)[0]
    yield "save_state ÷ dcp.save", f"{saving:.2f}", "≤ 1.10"
    yield "load_state ÷ dcp.load", f"{loading:.2f}", "≤ 1.10"
    yield "standstill of a background save ÷ blocking save", f"{standstill:.2f}", "≤ 0.25"


ROWS = {
    "steps": rows_of_steps,
    "host": rows_of_host,
    "memory": rows_of_memory,
    "load": rows_of_load,
    "save": rows_of_save,
    "state": rows_of_state,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="not used: the peer does not shard on a CPU")
    parser.add_argument("--gib", type=float, default=1.6, help="size of the weights that are loaded and saved")
    parser.add_argument("--only", choices=ROWS, help="measure one row")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        name, *arguments = json.loads(args.work)
        report(WORK[name], *arguments)
        return
    print("| 2 gloo ranks | version 2 | version 1 | target |\n|---|---|---|---|")
    for name in [args.only] if args.only else ROWS:
        second, first = (list(ROWS[name](version, args.gib)) for version in (2, 1))
        for (title, value, reach), (_, other, _) in zip(second, first, strict=True):
            print(f"| {title} | {value} | {other} | {reach} |", flush=True)


if __name__ == "__main__":
    main()
