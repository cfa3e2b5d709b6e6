"""Large models: accel beside the limit and, with `--peer`, beside Accelerate 1.15.0.

    python benchmarks/bigmodel.py [--peer PYTHON] [--gib 1.6] [--only ROW ...]

Each row runs in a process of its own. The limit is measured in the same run: what plain torch and safetensors need for
the same bytes.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS = ("empty", "load", "disk_ready", "disk_forward", "hooks_forced", "hooks_offloaded", "placing")


def best(function: Callable[[], object], repeat: int = 5) -> float:
    """Give the least seconds of several calls."""
    found = float("inf")
    for _ in range(repeat):
        begin = time.perf_counter()
        function()
        found = min(found, time.perf_counter() - begin)
    return found


def resident() -> float:
    """Give the process's resident memory in MiB, mapped pages included."""
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def library(name: str) -> Any:
    """Import accel_bigmodel, or the original under its own names."""
    module = importlib.import_module(name)
    if name == "accelerate":
        importlib.import_module("accelerate.utils")
        for source in ("accelerate.utils", "accelerate.hooks", "accelerate.big_modeling"):
            for key, value in vars(importlib.import_module(source)).items():
                if not hasattr(module, key):
                    setattr(module, key, value)
    else:
        for key in module.__all__:  # names come lazily; importing is measured elsewhere
            getattr(module, key)
    return module


def make_checkpoint(folder: Path, gib: float) -> None:
    """Write 48 layers in 6 safetensors files."""
    import torch
    from safetensors.torch import save_file

    width = int((gib * 2**30 / 48 / 4) ** 0.5)
    weight_map = {}
    for shard in range(6):
        file = f"model-{shard}.safetensors"
        tensors = {f"{n}.weight": torch.randn(width, width) / width**0.5 for n in range(shard * 8, shard * 8 + 8)}
        save_file(tensors, folder / file)
        weight_map.update(dict.fromkeys(tensors, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map, "width": width}))


def stack(width: int) -> Any:
    """Make the empty model of the checkpoint."""
    import torch
    from torch import nn

    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(48)])


def run_empty(lib: Any, folder: Path) -> dict[str, float]:
    """A 100-billion-parameter model without weights, beside the same under torch.device("meta")."""
    import torch
    from torch import nn

    def ours() -> None:
        with lib.init_empty_weights():
            nn.Sequential(*[nn.Linear(10_000, 10_000) for _ in range(1000)])

    def meta() -> None:
        with torch.device("meta"):
            nn.Sequential(*[nn.Linear(10_000, 10_000) for _ in range(1000)])

    ours(), meta()
    before = resident()
    with lib.init_empty_weights():
        kept = nn.Sequential(*[nn.Linear(10_000, 10_000) for _ in range(1000)])
    grown = resident() - before
    del kept
    return {"seconds": best(ours), "limit": best(meta), "MiB": grown}


def _open(lib: Any, folder: Path, device_map: dict[str, str], offload: Path | None = None) -> Any:
    width = json.loads((folder / "model.safetensors.index.json").read_text())["width"]
    extra = {} if offload is None else {"offload_folder": offload}
    return lib.load_checkpoint_and_dispatch(stack(width), str(folder), device_map=device_map, **extra)


def _plain(folder: Path) -> Any:
    """Load with safetensors and assign: the limit."""
    from safetensors.torch import load_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    model = stack(index["width"])
    state = {}
    for file in sorted(set(index["weight_map"].values())):
        state.update(load_file(folder / file))
    model.load_state_dict(state, assign=True)
    return model


def run_load(lib: Any, folder: Path) -> dict[str, float]:
    """Sharded safetensors to the CPU and the first forward."""
    import torch

    x = torch.randn(1, stack_width(folder))

    def ours() -> None:
        with torch.no_grad():
            _open(lib, folder, {"": "cpu"})(x)

    def limit() -> None:
        with torch.no_grad():
            _plain(folder)(x)

    limit(), ours()
    return {"seconds": best(ours, 3), "limit": best(limit, 3)}


def stack_width(folder: Path) -> int:
    """Read the checkpoint's width."""
    return int(json.loads((folder / "model.safetensors.index.json").read_text())["width"])


def _disk_map() -> dict[str, str]:
    return {str(number): "cpu" if number < 4 else "disk" for number in range(48)}


def run_disk_ready(lib: Any, folder: Path) -> dict[str, float]:
    """44 of 48 layers on disk: until the model is ready, and what was written for it."""
    with tempfile.TemporaryDirectory() as offload:
        begin = time.perf_counter()
        _open(lib, folder, _disk_map(), Path(offload))
        seconds = time.perf_counter() - begin
        written = sum(path.stat().st_size for path in Path(offload).rglob("*") if path.is_file()) / 2**20
    return {"seconds": seconds, "written MiB": written}


def run_disk_forward(lib: Any, folder: Path) -> dict[str, float]:
    """Each forward with 44 of 48 layers on disk, page cache warm; the limit touches every weight once."""
    import torch
    from safetensors import safe_open

    width = stack_width(folder)
    x = torch.randn(1, width)
    with tempfile.TemporaryDirectory() as offload, torch.no_grad():
        model = _open(lib, folder, _disk_map(), Path(offload))
        files = sorted(folder.glob("*.safetensors"))

        def limit() -> None:
            value = x
            for file in files:
                with safe_open(file, "pt") as opened:
                    for name in opened.keys():  # noqa: SIM118
                        value = torch.nn.functional.linear(value, opened.get_tensor(name))

        limit()
        model(x)
        before = resident()
        peak = 0.0
        for layer in model:
            layer.register_forward_hook(lambda *_: None)
        model(x)
        after = resident()
        peak = after - before
        result = {"seconds": best(lambda: model(x), 5), "limit": best(limit, 5), "VmRSS MiB": peak}
    return result


def _tiny() -> Any:
    from torch import nn

    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(1000)]).eval()


def run_hooks_forced(lib: Any, folder: Path) -> dict[str, float]:
    """Microseconds that a forced hook adds to a call."""
    import torch

    x = torch.randn(1, 4)
    with torch.no_grad():
        plain = _tiny()
        base = best(lambda: plain(x), 20)
        model = lib.dispatch_model(_tiny(), {"": "cpu"}, force_hooks=True)
        return {"µs per call": (best(lambda: model(x), 20) - base) * 1e6 / 1000}


def run_hooks_offloaded(lib: Any, folder: Path) -> dict[str, float]:
    """Microseconds that an offloading hook adds to a call."""
    import torch

    x = torch.randn(1, 4)
    with torch.no_grad():
        plain = _tiny()
        base = best(lambda: plain(x), 20)
        model = lib.cpu_offload(_tiny(), torch.device("cpu"))
        return {"µs per call": (best(lambda: model(x), 20) - base) * 1e6 / 1000}


def run_placing(lib: Any, folder: Path) -> dict[str, float]:
    """Balanced limits and the map of 61 layers of 256 experts, beside one walk over `named_parameters`."""
    import torch
    from torch import nn

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate, self.down = (nn.Linear(8, 8, bias=False) for _ in range(3))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.Linear(8, 8)
            self.experts = nn.ModuleList([Expert() for _ in range(256)])

    with torch.device("meta"):
        model = nn.ModuleList([Layer() for _ in range(61)])

    def ours() -> None:
        limits = lib.get_balanced_memory(model, max_memory=dict.fromkeys(range(8), 10**9))
        lib.infer_auto_device_map(model, max_memory=limits)

    def walk() -> None:
        for _ in model.named_parameters():
            pass

    return {"seconds": best(ours, 3), "limit": best(walk, 3), "modules": sum(1 for _ in model.modules())}


def main() -> None:
    """Run the rows, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", default=None, help="a Python that has accelerate 1.15.0")
    parser.add_argument("--gib", type=float, default=1.6)
    parser.add_argument("--only", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--row", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--library", default="accel_bigmodel", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row is not None:
        import logging

        logging.disable(logging.WARNING)
        row = globals()[f"run_{args.row}"](library(args.library), Path(args.folder))
        print(json.dumps(row))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), args.gib)
        sides = [("accel", sys.executable, "accel_bigmodel")]
        if args.peer:
            sides.append(("accelerate", args.peer, "accelerate"))
        print(f"{'row':16} {'side':11} result")
        for name in args.only:
            for side, python, module in sides:
                command = [python, __file__, "--row", name, "--library", module, "--folder", folder]
                done = subprocess.run(
                    command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONWARNINGS": "ignore"}
                )
                if done.returncode:
                    print(f"{name:16} {side:11} failed: {done.stderr.strip().splitlines()[-1]}")
                    continue
                row = json.loads(done.stdout.splitlines()[-1])
                if "limit" in row:
                    row["x limit"] = row["seconds"] / row["limit"]
                print(f"{name:16} {side:11} " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
