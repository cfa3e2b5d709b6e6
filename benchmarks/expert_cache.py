"""A mixture of experts on one machine: bytes, time and memory of experts that come one by one.

    python benchmarks/expert_cache.py [--peer PYTHON] [--only ROW ...]

The model has Mixtral's shape: 8 experts in each layer, of which 2 work on a token. Bytes from the disk are those that
the kernel counts, with the page cache dropped for the checkpoint; the peer loads the same checkpoint with every layer
on the disk.
"""

import argparse
import contextlib
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MIB = 2**20
LAYERS, WIDTH, INNER, COUNT, CHOICES = 8, 1024, 2176, 8, 2
TOKENS = 24
MANY = 26
"""Layers of a model of several times the address space."""


def config(layers: int = LAYERS) -> Any:
    """Return the model's configuration: about 200 MiB a layer in float32."""
    from transformers import MixtralConfig

    return MixtralConfig(
        vocab_size=1024,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_local_experts=COUNT,
        num_experts_per_tok=CHOICES,
        max_position_embeddings=256,
    )


def empty(layers: int = LAYERS) -> Any:
    """Make the model without weights, with transformers' own loop over experts."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(layers), experts_implementation="eager").eval()
    # Its one buffer that no checkpoint has.
    rotary = type(model.model.rotary_emb)(model.config)
    model.model.rotary_emb = rotary
    return model


def make_checkpoint(folder: Path, layers: int = LAYERS) -> None:
    """Write random weights, one file a layer."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    files: dict[str, dict[str, Any]] = {}
    for name, tensor in empty(layers).state_dict().items():
        part = name.split(".layers.")[1].split(".")[0] if ".layers." in name else "rest"
        files.setdefault(f"model-{part}.safetensors", {})[name] = tensor
    weight_map = {}
    for file, tensors in files.items():
        made = {name: torch.randn(tensor.shape) / tensor.shape[-1] ** 0.5 for name, tensor in tensors.items()}
        save_file(made, folder / file)
        weight_map.update(dict.fromkeys(tensors, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def places(model: Any, away: str) -> dict[str, str]:
    """Leave dense parts on the CPU, and experts where they are."""
    found = {}
    for name, _ in (*model.named_parameters(), *model.named_buffers()):
        found[name.rpartition(".")[0] if ".mlp.experts" in name else name] = away if ".mlp.experts" in name else "cpu"
    return found


def loaded(folder: Path, layers: int = LAYERS, **arguments: Any) -> Any:
    """Load the model with its experts on the disk."""
    from accel_bigmodel import load_checkpoint_and_dispatch

    model = empty(layers)
    return load_checkpoint_and_dispatch(model, folder, device_map=places(model, "disk"), **arguments)


def dropped(folder: Path) -> None:
    """Drop a checkpoint from the page cache."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_bytes() -> int:
    """Return how many bytes this process had fetched from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def memory(key: str = "VmRSS") -> int:
    """Return the bytes of a line of the process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def one_expert() -> int:
    """Return the bytes of an expert."""
    return 3 * WIDTH * INNER * 4


def run_cold(folder: Path) -> dict[str, float]:
    """Bytes that the disk gave for a forward of one token, over those of the experts it chose and dense parts away."""
    import torch

    torch.set_num_threads(1)  # counted, not timed

    model = loaded(folder, expert_cache="4GiB")
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.detach().sum()  # dense parts are here
    report, words = model.expert_report, torch.tensor([[1]])
    with torch.inference_mode():
        model(torch.tensor([[2]]))  # code pages come too
        before, asked = report(), 0
        model.expert_cache.resize(one_expert())
        model.expert_cache.resize("4GiB")
        dropped(folder)
        for parameter in model.parameters():
            if not parameter.is_meta:
                parameter.detach().sum()
        start = read_bytes()
        model(words)
        found = read_bytes() - start
    after = report()
    asked = after.from_disk - before.from_disk
    return {"value": found / asked, "MiB": found / MIB}


def run_warm(folder: Path) -> dict[str, float]:
    """Bytes asked of the disk over those of the misses, in 24 tokens with a cache of half of the experts."""
    import torch

    torch.set_num_threads(1)  # counted, not timed

    model = loaded(folder, expert_cache=LAYERS * COUNT // 2 * one_expert())
    with torch.inference_mode():
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    report = model.expert_report()
    return {"value": report.from_disk / (report.misses * one_expert()), "hits": report.hit_rate}


def run_memory(folder: Path) -> dict[str, float]:
    """Growth of memory in 24 tokens, pages of files included, over what the budget and dense parts take."""
    import torch

    torch.set_num_threads(1)  # counted, not timed

    budget = 6 * one_expert()
    model = loaded(folder, expert_cache=budget)
    with torch.inference_mode():
        for parameter in model.parameters():
            if not parameter.is_meta:
                parameter.detach().sum()
        small = torch.randn(64, 64)
        small @ small
        before = memory()
        Path("/proc/self/clear_refs").write_text("5")
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    beyond = memory("VmHWM") - before - budget
    return {"value": beyond / MIB, "limit": one_expert() / MIB + 16}


def run_clock(folder: Path) -> dict[str, float]:
    """A decode step of the production cache under a virtual clock, over max(copy of misses, compute) + first miss."""
    from dataclasses import dataclass

    import torch

    from accel_bigmodel.experts.cache import ExpertCache
    from accel_bigmodel.experts.source import Brought

    @dataclass
    class Link:
        """Transfers follow each other."""

        now: float = 0.0
        free: float = 0.0

    @dataclass
    class Layer:
        """Experts that come over the link and say when they have come."""

        name: str
        link: Link
        count: int = 64
        waits: bool = False
        nbytes: int = 100

        def state(self) -> tuple[object, ...]:
            return ()

        def read(self, number: int) -> Brought:
            self.link.free = max(self.link.free, self.link.now) + 1.0
            return Brought({"came": torch.tensor(self.link.free, dtype=torch.float64)}, from_disk=100)

    def worst(depth: int) -> float:
        found = 0.0
        for compute in (0.25, 0.5, 1.0, 2.0):
            for present in range(9):
                link, cache = Link(), ExpertCache(100 * 64 * depth)
                layers = [Layer(f"experts.{number}", link) for number in range(depth)]
                for layer in layers:
                    for _ in cache.bring(layer, range(present), 1):
                        pass
                link.now = link.free = 100.0
                wanted = sorted([*range(56, 64 - present), *range(present)])
                for number, layer in enumerate(layers):
                    ahead = (layers[number + 1], wanted) if number + 1 < depth else None
                    brought = cache.bring(layer, wanted, 1, present_first=True, guess=lambda ahead=ahead: ahead)
                    for _, weights in brought:
                        link.now = max(link.now, float(weights["came"])) + compute
                misses = depth * (8 - present)
                least = max(misses * 1.0, depth * 8 * compute) + (1.0 if misses else 0.0)
                found = max(found, (link.now - 100.0) / least)
        return found

    return {"value": worst(1), "step": worst(LAYERS)}


def run_limited(folder: Path) -> dict[str, float]:
    """A model of 4 times RLIMIT_AS generates: its bytes over the limit, and whether its words are the resident's."""
    import torch

    torch.set_num_threads(1)  # counted, not timed
    import gc

    import transformers  # noqa: F401  its libraries take address space before the limit is set

    from accel_bigmodel import load_checkpoint_and_dispatch

    words, how = torch.tensor([[1, 2, 3]]), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with tempfile.TemporaryDirectory(dir=folder.parent) as made, torch.inference_mode():
        large = Path(made)
        make_checkpoint(large, MANY)
        size = sum(file.stat().st_size for file in large.glob("*.safetensors"))
        whole = load_checkpoint_and_dispatch(empty(MANY), large, device_map={"": "cpu"}).generate(words, **how)
        gc.collect()
        limit = memory("VmSize") + 256 * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        everything = {"": "disk"}
        model = load_checkpoint_and_dispatch(empty(MANY), large, everything, expert_cache=2 * one_expert())
        same = torch.equal(model.generate(words, **how), whole)
    if not same:
        raise SystemExit("the words differ")
    return {"value": size / limit}


def run_dense(folder: Path) -> dict[str, float]:
    """A dense forward from the disk over one map that stays, the cache warm, for files in large and small pieces."""
    import torch
    from safetensors import safe_open
    from torch import nn

    from accel_bigmodel import load_checkpoint_and_dispatch

    layers, width = 48, 2944
    found = {}
    for key, piece in (("large", None), ("small", 4096)):
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            file, x = Path(made) / "model.safetensors", torch.randn(1, width)
            _write_dense(file, layers, width, piece)
            with torch.device("meta"):
                model: Any = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
            model = load_checkpoint_and_dispatch(model, file, {str(number): "disk" for number in range(layers)})
            with safe_open(file, "pt") as opened, torch.no_grad():
                weights = [opened.get_tensor(f"{number}.weight") for number in range(layers)]

                def plain(weights: list[Any] = weights, x: Any = x) -> None:
                    for weight in weights:
                        x = torch.nn.functional.linear(x, weight)

                times = _in_turns({"ours": lambda model=model, x=x: model(x), "plain": plain}, 12)
        found[key] = times["ours"] / times["plain"]
    return {"value": found["large"], "small": found["small"]}


def _write_dense(file: Path, layers: int, width: int, piece: int | None) -> None:
    import torch

    size = 4 * width * width
    spans = {f"{number}.weight": [number * size, (number + 1) * size] for number in range(layers)}
    header = json.dumps(
        {name: {"dtype": "F32", "shape": [width, width], "data_offsets": span} for name, span in spans.items()}
    ).encode()
    header += b" " * (-len(header) % 8)
    with open(file, "wb", buffering=0) as out:
        out.write(len(header).to_bytes(8, "little") + header)
        for _ in range(layers):
            content = memoryview((torch.randn(width, width) / width**0.5).numpy()).cast("B")
            for at in range(0, size, piece or size):
                out.write(content[at : at + (piece or size)])


def _in_turns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number:
                times[name].append(time.perf_counter() - start)
    return {name: min(each) for name, each in times.items()}


def own_mixture() -> Any:
    """Make an empty mixture of plain torch in the shape of the checkpoint's experts: the peer has no transformers."""
    import torch
    from torch import nn

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts = COUNT
            self.gate_up_proj = nn.Parameter(torch.empty(COUNT, 2 * INNER, WIDTH))
            self.down_proj = nn.Parameter(torch.empty(COUNT, WIDTH, INNER))

        def forward(self, tokens: Any, numbers: Any, weights: Any) -> Any:
            output = torch.zeros_like(tokens)
            for number in range(self.num_experts):
                choice, rows = torch.where((numbers == number).T)
                if len(rows):
                    gate, up = (tokens[rows] @ self.gate_up_proj[number].T).chunk(2, -1)
                    made = (nn.functional.silu(gate) * up) @ self.down_proj[number].T
                    output = output.index_add(0, rows, made * weights[rows, choice, None])
            return output

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(WIDTH, COUNT, bias=False), Experts()

        def forward(self, tokens: Any) -> Any:
            weights, numbers = self.gate(tokens).softmax(-1).topk(CHOICES)
            return nn.functional.rms_norm(tokens + self.experts(tokens, numbers, weights), (WIDTH,))

    with torch.device("meta"):
        return nn.Sequential(*[Layer() for _ in range(LAYERS)])


def run_forward(folder: Path, library: str = "accel") -> dict[str, float]:
    """Seconds of a forward of one token, the page cache warm and experts on the disk; every token is another."""
    import torch
    from safetensors.torch import load_file, save_file

    extra: dict[str, Any] = {"offload_folder": str(folder / "peer")}
    if library == "accel":
        from accel_bigmodel import load_checkpoint_and_dispatch

        extra = {"expert_cache": CHOICES * one_expert()}
    else:
        from accelerate import load_checkpoint_and_dispatch
    plain = folder / "plain.safetensors"
    if not plain.exists():
        state = {}
        for number in range(LAYERS):
            for name, tensor in load_file(folder / f"model-{number}.safetensors").items():
                if ".mlp." in name:
                    state[f"{number}.{name.partition('.mlp.')[2]}"] = tensor
        save_file(state, plain)
        del state
    plain.read_bytes()
    split = {f"{n}.{name}": place for n in range(LAYERS) for name, place in (("gate", "cpu"), ("experts", "disk"))}
    model = load_checkpoint_and_dispatch(own_mixture(), str(plain), device_map=split, **extra)
    times = []
    with torch.inference_mode():
        for token in torch.randn(12, 1, WIDTH):
            start = time.perf_counter()
            model(token)
            times.append(time.perf_counter() - start)
    return {"value": min(times[1:])}


ROWS = {
    "cold": "bytes from the disk for a token, cold ÷ those of the distinct experts chosen (dense parts in memory)",
    "warm": "bytes asked of the disk in 24 tokens, half of the experts in the cache ÷ those of the misses",
    "clock": "a layer under a virtual clock ÷ max(copy of misses, compute) + first miss, worst of 36 cases; a step "
    "of 8 layers, guesses right",
    "memory": "memory beyond dense parts and budget at the peak of 24 tokens, pages included, MiB",
    "limited": "a model generates 8 tokens from files of so many times RLIMIT_AS",
    "dense": "dense forward from the disk ÷ one map that stays, cache warm, file written at once; in pieces of 4 KiB",
    "forward": "forward of one token, page cache warm, 8 experts in 8 layers on the disk, of which 2 work, ms",
}


def child(row: str, python: str, folder: Path, library: str = "accel") -> dict[str, float] | None:
    """Measure a row in a process of its own."""
    command = [python, __file__, "--run", row, "--folder", str(folder), "--library", library]
    # The peer's Python has packages of its own, and none of this repository's.
    env = {key: value for key, value in os.environ.items() if library == "accel" or key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        sys.stderr.write(f"{row} failed:\n{done.stderr[-3000:]}\n")
        return None
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextlib.contextmanager
def checkpoint(directory: str | None) -> Iterator[Path]:
    """Give a folder with the model for a while."""
    with tempfile.TemporaryDirectory(dir=directory) as made:
        folder = Path(made) / "model"
        folder.mkdir()
        make_checkpoint(folder)
        yield folder


def cells(row: str, found: dict[str, float], peer: dict[str, float] | None) -> tuple[str, str, str]:
    """Write what was found, the peer's figure, and the target."""
    value = found["value"]
    if row == "cold":
        return f"{value:.3f} ({found['MiB']:.0f} MiB)", "all experts", "≤ 1.02"
    if row == "warm":
        return f"{value:.3f} ({found['hits']:.0%} hits)", "all experts", "1"
    if row == "clock":
        return f"{value:.3f}; {found['step']:.3f}", "–", "≤ 1.05"
    if row == "memory":
        return f"{value:.1f}", "–", f"≤ {found['limit']:.1f}"
    if row == "limited":
        return f"{value:.2f}", "–", "≥ 4, same words"
    if row == "dense":
        return f"{value:.2f}; {found['small']:.2f}", "–", "≤ 1.1 both"
    ratio = "" if peer is None else f" ({value / peer['value']:.3f} of the peer)"
    return f"{1000 * value:.0f}{ratio}", "–" if peer is None else f"{1000 * peer['value']:.0f}", "≤ 0.1 of the peer"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=None, help="a Python that has accelerate 1.15.0")
    parser.add_argument("--only", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--directory", default=None, help="where the checkpoint goes; a temporary folder by default")
    parser.add_argument("--run", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--library", default="accel", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    if args.run is not None:
        extra = (args.library,) if args.run == "forward" else ()
        print(json.dumps(globals()[f"run_{args.run}"](Path(args.folder), *extra)))
        return
    with checkpoint(args.directory) as folder:
        print("| what, a Mixtral-shaped model of 1.6 GiB | accel | accelerate 1.15.0 | target |\n|---|---|---|---|")
        for row in args.only:
            found = child(row, sys.executable, folder)
            peer = child(row, args.peer, folder, "accelerate") if args.peer and row == "forward" else None
            if found is not None:
                print(f"| {ROWS[row]} | {' | '.join(cells(row, found, peer))} |", flush=True)


if __name__ == "__main__":
    main()
