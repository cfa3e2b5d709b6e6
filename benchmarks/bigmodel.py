"""Models larger than the device: building, loading, running from disk, hooks and placing.

    python benchmarks/bigmodel.py [--peer PYTHON] [--only ROW ...]

The limit is what plain torch and safetensors need for the same bytes, measured in turns with the library in the same
process. Every row has several processes of its own, and the table shows the median over them; the peer, which takes
many times as long, has one between them.
"""

import argparse
import contextlib
import importlib
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYERS, SHARDS = 48, 6
MIB = 2**20


def in_turns(
    ours: Callable[[], object], limit: Callable[[], object], repeat: int, warm: bool = True, seconds: float = 15.0
) -> dict[str, float]:
    """Give the least seconds of several calls of each, as many as fit into some time but at least one.

    The first call of each does not count if they have to warm up.
    """
    calls = {"value": ours, "limit": limit}
    least = dict.fromkeys(calls, float("inf"))
    start = time.perf_counter()
    for turn in range(repeat + warm):
        if turn > warm and time.perf_counter() - start > seconds:
            break
        for key, call in calls.items():
            begin = time.perf_counter()
            call()
            if turn >= warm:
                least[key] = min(least[key], time.perf_counter() - begin)
    return least


def memory(key: str) -> float:
    """Give a line of the process's status in MiB: "RssAnon" is its own memory, "VmHWM" the peak with mapped pages."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024


def growth(call: Callable[[], object]) -> float:
    """Give the MiB by which memory grows at the peak of a call."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = memory("VmRSS")
    call()
    return memory("VmHWM") - before


def own_growth(model: Any, call: Callable[[], object]) -> float:
    """Give the MiB by which a process's own memory, without pages of files, grows up to the end of some layer."""
    before, seen = memory("RssAnon"), []
    handles = [layer.register_forward_hook(lambda *_: seen.append(memory("RssAnon"))) for layer in model]
    call()
    for handle in handles:
        handle.remove()
    return max(seen) - before


def library(name: str) -> Any:
    """Import accel_bigmodel, or the original under the same names."""
    module = importlib.import_module(name)
    if name == "accelerate":
        for source in ("accelerate.utils", "accelerate.hooks", "accelerate.big_modeling"):
            for key, value in vars(importlib.import_module(source)).items():
                if not hasattr(module, key):
                    setattr(module, key, value)
    else:
        for key in module.__all__:  # names come lazily; importing is measured elsewhere
            getattr(module, key)
    return module


def make_checkpoint(folder: Path, gib: float) -> None:
    """Write the layers into several safetensors files with an index."""
    import torch
    from safetensors.torch import save_file

    width = int((gib * 2**30 / LAYERS / 4) ** 0.5)
    each = LAYERS // SHARDS
    weight_map = {}
    for shard in range(SHARDS):
        file = f"model-{shard}.safetensors"
        names = [f"{number}.weight" for number in range(shard * each, (shard + 1) * each)]
        save_file({name: torch.randn(width, width) / width**0.5 for name in names}, folder / file)
        weight_map.update(dict.fromkeys(names, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map, "width": width}))


def width_of(folder: Path) -> int:
    """Read how wide the checkpoint's layers are."""
    return int(json.loads((folder / "model.safetensors.index.json").read_text())["width"])


def shards_of(folder: Path) -> list[Path]:
    """List the checkpoint's files in the order of the layers."""
    return sorted(folder.glob("*.safetensors"))


def empty_stack(folder: Path) -> Any:
    """Make the checkpoint's model without weights."""
    import torch
    from torch import nn

    width = width_of(folder)
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(LAYERS)])


def loaded(lib: Any, folder: Path, device_map: dict[str, str], offload: str | None = None) -> Any:
    """Load the checkpoint with the library."""
    extra = {} if offload is None else {"offload_folder": offload}
    return lib.load_checkpoint_and_dispatch(empty_stack(folder), str(folder), device_map=device_map, **extra)


def mostly_on_disk() -> dict[str, str]:
    """Give the device map that leaves four layers on the CPU."""
    return {str(number): "cpu" if number < 4 else "disk" for number in range(LAYERS)}


def run_empty(lib: Any, folder: Path) -> dict[str, float]:
    """A model of 100 billion parameters, without weights."""
    import torch
    from torch import nn

    def build(context: Any, layers: int = 1000) -> Any:
        with context:
            return nn.Sequential(*[nn.Linear(10_000, 10_000) for _ in range(layers)])

    build(lib.init_empty_weights(), 1)
    kept = []
    taken = growth(lambda: kept.append(build(lib.init_empty_weights())))
    measured = in_turns(lambda: build(lib.init_empty_weights()), lambda: build(torch.device("meta")), 5)
    return {**measured, "MiB": taken}


def run_load(lib: Any, folder: Path) -> dict[str, float]:
    """A sharded checkpoint onto the CPU, to the end of the first forward."""
    import torch
    from safetensors.torch import load_file

    x = torch.randn(1, width_of(folder))

    def plain() -> Any:
        model, state = empty_stack(folder), {}
        for file in shards_of(folder):
            state.update(load_file(file))
        model.load_state_dict(state, assign=True)
        return model(x)

    with torch.no_grad():
        return in_turns(lambda: loaded(lib, folder, {"": "cpu"})(x), plain, 3)


def run_ready(lib: Any, folder: Path) -> dict[str, float]:
    """44 of 48 layers on disk: until the model is ready, and what is written for it."""
    with tempfile.TemporaryDirectory(dir=folder) as offload:
        begin = time.perf_counter()
        loaded(lib, folder, mostly_on_disk(), offload)
        seconds = time.perf_counter() - begin
        written = sum(path.stat().st_size for path in Path(offload).rglob("*") if path.is_file()) / MIB
    return {"value": seconds, "MiB": written}


def run_forward(lib: Any, folder: Path) -> dict[str, float]:
    """Each forward with 44 of 48 layers on disk and the page cache warm; the limit touches every weight once."""
    import torch
    from safetensors import safe_open

    width = width_of(folder)
    x = torch.randn(1, width)

    def plain() -> None:
        value = x
        for file in shards_of(folder):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    value = torch.nn.functional.linear(value, opened.get_tensor(name))

    with tempfile.TemporaryDirectory(dir=folder) as offload, torch.no_grad():
        model = loaded(lib, folder, mostly_on_disk(), offload)
        measured = in_turns(lambda: model(x), plain, 4)
        return {**measured, "MiB": own_growth(model, lambda: model(x)), "layer MiB": width * width * 4 / MIB}


def added_per_call(dispatch: Callable[[Any], Any]) -> dict[str, float]:
    """Give the microseconds that hooks add to a call of a tiny layer."""
    import torch
    from torch import nn

    def tiny() -> Any:
        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(1000)]).eval()

    x = torch.randn(1, 4)
    with torch.no_grad():
        plain, hooked = tiny(), dispatch(tiny())
        measured = in_turns(lambda: hooked(x), lambda: plain(x), 20)
    return {"value": (measured["value"] - measured["limit"]) * 1e6 / 1000}


def run_forced(lib: Any, folder: Path) -> dict[str, float]:
    """What a forced hook adds to a module's call."""
    return added_per_call(lambda model: lib.dispatch_model(model, {"": "cpu"}, force_hooks=True))


def run_offloaded(lib: Any, folder: Path) -> dict[str, float]:
    """What an offloading hook adds to a module's call."""
    import torch

    return added_per_call(lambda model: lib.cpu_offload(model, torch.device("cpu")))


def run_placing(lib: Any, folder: Path) -> dict[str, float]:
    """Balanced limits and the map of layers of 256 experts, beside one walk over `named_parameters`."""
    import torch
    from torch import nn

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate, self.down = (nn.Linear(8, 8, bias=False) for _ in range(3))

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(8, 8, bias=False) for _ in range(4))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.attention, self.after = nn.LayerNorm(8), Attention(), nn.LayerNorm(8)
            self.gate = nn.Linear(8, 256)
            self.experts = nn.ModuleList([Expert() for _ in range(256)])

    class Model(nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64, bias=False)
            self.layers = nn.ModuleList([Layer() for _ in range(layers)])
            self.norm = nn.LayerNorm(8)

    def measured(layers: int, warm: bool) -> dict[str, float]:
        with torch.device("meta"):
            model = Model(layers)

        def place() -> None:
            limits = lib.get_balanced_memory(model, max_memory=dict.fromkeys(range(8), 10**9))
            lib.infer_auto_device_map(model, max_memory=limits)

        def walk() -> None:
            for _ in model.named_parameters():
                pass

        return {**in_turns(place, walk, 3, warm), "modules": sum(1 for _ in model.modules())}

    few, many = measured(61, True), measured(194, False)
    per_module = [found["value"] / found["modules"] for found in (few, many)]
    return {
        **few,
        "many": many["value"],
        "many limit": many["limit"],
        "many modules": many["modules"],
        "growth": per_module[1] / per_module[0],
    }


def run_device(lib: Any, folder: Path) -> dict[str, float]:
    """Gigabytes per second of a forward whose weights wait on the CPU; the limit copies pinned memory."""
    import torch
    from torch import nn

    device = torch.accelerator.current_accelerator()
    assert device is not None
    device = torch.device(device.type, 0)
    model = nn.Sequential(*[nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16) for _ in range(24)])
    model.requires_grad_(False)
    size = sum(parameter.nbytes for parameter in model.parameters())
    source = torch.empty(256 * MIB, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device=device)
    x = torch.ones(1, 8192, dtype=torch.bfloat16, device=device)
    model = lib.cpu_offload(model, device)

    def forward() -> None:
        model(x)
        torch.accelerator.synchronize()

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()

    with torch.no_grad():
        seconds = in_turns(forward, copy, 5)
    return {"value": size / seconds["value"] / 1e9, "limit": source.nbytes / seconds["limit"] / 1e9}


@dataclass(frozen=True)
class Line:
    """A line of the table: its words, what it shows of a run's figures, and what is to be reached."""

    run: str
    words: str
    key: str
    limit: str | None
    unit: str
    reach: str


LINES = (
    Line("empty", "100-billion-parameter `nn.Sequential` of Linears, empty; limit: `torch.device('meta')`",
         "value", "limit", "ms", "≤ 0.7 ×"),
    Line("empty", "… memory it takes", "MiB", None, "MiB", "≤ 15 MiB"),
    Line("load", "sharded safetensors (6 files) → CPU → first forward; limit: safetensors and assign",
         "value", "limit", "ms", "≤ 1.1 ×"),
    Line("ready", "44 of 48 layers on disk: until ready", "value", None, "ms", "≤ 100 ms"),
    Line("ready", "… written for it", "MiB", None, "MiB", "0 MiB"),
    Line("forward", "… each forward, page cache warm; limit: every weight once through safetensors' map",
         "value", "limit", "ms", "≤ 1.15 ×"),
    Line("forward", "… growth of own memory in a forward, without pages of files; limit: one layer",
         "MiB", "layer MiB", "MiB", "≤ 80 MiB"),
    Line("forced", "added per module call, forced hooks", "value", None, "µs", "≤ 4 µs"),
    Line("offloaded", "added per module call, offloaded", "value", None, "µs", "≤ 5 µs"),
    Line("placing", "balanced + infer, {modules:,.0f} modules; limit: one `named_parameters()` walk",
         "value", "limit", "ms", "≤ 3 ×"),
    Line("placing", "… {many modules:,.0f} modules", "many", "many limit", "ms", "≤ 3 ×"),
    Line("placing", "… time per module there ÷ time per module above", "growth", None, "", "linear: 1"),
    Line("device", "`cpu_offload` forward on a GPU; limit: copies of pinned memory", "value", "limit", "GB/s",
         "≥ 0.90 ×"),
)  # fmt: skip
RUNS = tuple(dict.fromkeys(line.run for line in LINES))


def measure(run: str, side: str, python: str, folder: Path) -> dict[str, float] | None:
    """Take one turn in a process of its own; None if it failed, with its last words on stderr."""
    command = [python, __file__, "--run", run, "--library", side, "--folder", str(folder)]
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        sys.stderr.write(f"{run} with {side} failed:\n{done.stderr}\n")
        return None
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def median(turns: list[dict[str, float]]) -> dict[str, float]:
    """Give the median of each figure, and of its ratio to the limit of the same turn."""
    figures = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
    for line in LINES:
        if line.key in figures and line.limit in figures:
            ratios = [turn[line.key] / turn[line.limit] for turn in turns]
            figures[f"{line.key} ÷ {line.limit}"] = statistics.median(ratios)
    return figures


def cell(line: Line, figures: dict[str, float] | None) -> str:
    """Write a figure with its unit and its ratio to the limit."""
    if figures is None:
        return "–"
    value = figures[line.key] * (1000 if line.unit == "ms" else 1)
    text = f"{value:,.2f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
    text = f"{text} {line.unit}".strip()
    return text if line.limit is None else f"{text} ({figures[f'{line.key} ÷ {line.limit}']:.2f} ×)"


def has_accelerator() -> bool:
    """Tell whether a device is here that weights can travel to."""
    import torch

    return torch.accelerator.is_available()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=None, help="a Python that has accelerate 1.15.0")
    parser.add_argument("--gib", type=float, default=1.6, help="size of the checkpoint")
    parser.add_argument("--turns", type=int, default=3, help="processes per row; the peer is in the middle one alone")
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--directory", default=None, help="where the checkpoint goes; a temporary folder by default")
    parser.add_argument("--run", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--library", default="accel_bigmodel", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is not None:
        logging.disable(logging.WARNING)
        print(json.dumps(globals()[f"run_{args.run}"](library(args.library), Path(args.folder))))
        return
    sides = {"accel": ("accel_bigmodel", sys.executable)}
    if args.peer:
        sides["accelerate 1.15.0"] = ("accelerate", args.peer)
    turns: dict[tuple[str, str], list[dict[str, float]]] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.directory)))
        if {"load", "ready", "forward"} & set(args.only):
            make_checkpoint(folder, args.gib)
        for run in RUNS:
            if run not in args.only or (run == "device" and not has_accelerator()):
                continue
            for turn in range(args.turns):
                for title, (name, python) in sides.items():
                    if python != sys.executable and turn != args.turns // 2:
                        continue
                    found = measure(run, name, python, folder)
                    if found is not None:
                        turns.setdefault((run, title), []).append(found)
    figures = {key: median(found) for key, found in turns.items()}
    print(f"| what, checkpoint of {args.gib} GiB | limit | {' | '.join(sides)} | target |")
    print(f"|---|---|{'---|' * len(sides)}---|")
    for line in LINES:
        if line.run not in args.only:
            continue
        cells = [figures.get((line.run, title)) for title in sides]
        if line.run == "device" and not has_accelerator():
            print(f"| {line.words} | not measured: no GPU |{' |' * len(sides)} {line.reach} |")
            continue
        limit = "" if line.limit is None else cell(Line("", "", line.limit, None, line.unit, ""), cells[0])
        words = line.words if cells[0] is None else line.words.format_map(cells[0])
        print(f"| {words} | {limit} | {' | '.join(cell(line, found) for found in cells)} | {line.reach} |")


if __name__ == "__main__":
    main()
