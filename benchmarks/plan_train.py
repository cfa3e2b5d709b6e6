"""Memory of a training step on 1, 2 and 4 ranks: what `accel plan --train` predicts, beside what was measured.

    python benchmarks/plan_train.py [--only MODEL/LAYOUT] [--peer PYTHON]

Predicted: by one process that has neither weights nor devices, before anything is trained. Measured: an `Accelerator`
trains real tensors on a CPU. torch's CPU allocator reports every allocation and every release to torch's profiler, from
before the model is made on; the figure is the most bytes that were allocated at once in the third step. The allocator
knows nothing of the prediction, which counts tensors by the operations that make them.

Twice: "program" is the first rank alone, whose collectives return at once (torch's fake process group), so that what it
allocates is what the program does; under DistributedDataParallel, which reduces in place, it is that of gloo. "gloo" is
all ranks at once over gloo, the one that had most: gloo copies what it gathers and reduces, and its threads hold what
they sent last until they send again, which differs from run to run. The reach is that of the program; NCCL has no such
copies. "Growth of the process" is the gloo rank's peak resident memory in that step over what it had before the model
was made: it holds the profiler's records and code that was loaded too. There is no column of the peer: it predicts no
activations.

The last row is the time in which a process learns which rank does what in a layout of 1,024 ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MIB = 2**20
CASES = {
    "mlp": {"sample": "1024", "batch": 512, "loss": "mean_square"},
    "transformer": {"sequence": 256, "batch": 8, "loss": "next_token"},
    "convolutional": {"sample": "3x64x64", "batch": 32, "loss": "classes"},
    "llama": {"sequence": 256, "batch": 8, "loss": None},  # its own, with logits of some tokens at a time
}
OWN = ("mlp", "transformer", "convolutional")  # without a library
LAYOUTS = {
    "mlp": ("single", "dp2", "fsdp2", "tp2", "fsdp4"),
    "transformer": ("single", "cp2", "fsdp2", "fsdp2xtp2"),
    "convolutional": ("single", "dp2", "fsdp2", "hsdp2x2"),
    "llama": ("single", "fsdp2", "hsdp2x2", "fsdp2xtp2"),
}
ZERO = ("zero1x1", "zero2x1", "zero1x2", "zero2x2", "zero3x2")
BUCKET = 1_000_000  # elements; DeepSpeed's own, 500 million, would hide everything else
CHECKPOINTING = ("transformer/single", "transformer/fsdp2", "llama/fsdp2")
BF16 = ("transformer/single", "llama/fsdp2")
ZERO_BF16 = ("zero1x2", "zero2x2", "zero3x2")
ZERO_ACCUMULATED = ("zero1x2", "zero2x2", "zero3x2")
PASSES = 3
"""Backward passes of a step that accumulates."""


def mlp() -> Any:
    """Return a list of equal blocks of two linear layers."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(1024, 2048), nn.Linear(2048, 1024)

        def forward(self, x: Any) -> Any:
            return x + self.down(self.up(x).relu())

    class Mlp(nn.Module):
        tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.head = nn.Linear(1024, 16)

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return Mlp()


def transformer() -> Any:
    """Return a causal language model of four blocks."""
    import torch
    from torch import nn

    width, heads, words = 384, 6, 2000

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
            self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            y = self.before(x)
            q, k, v = (
                layer(y).unflatten(-1, (-1, width // heads)).transpose(1, 2) for layer in (self.q, self.k, self.v)
            )
            seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(seen.transpose(1, 2).flatten(2))
            return x + self.down(nn.functional.gelu(self.up(self.between(x))))

    class Transformer(nn.Module):
        tp_plan = {f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up")} | {
            "blocks.*.o": "rowwise",
            "blocks.*.down": "rowwise",
        }

        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(words, width)
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.last, self.head = nn.LayerNorm(width), nn.Linear(width, words)

        def forward(self, tokens: torch.Tensor) -> Any:
            x = self.words(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.last(x))

    return Transformer()


def convolutional() -> Any:
    """Return a residual network of two stages."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self, into: int, out: int, stride: int) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
            self.second, self.last = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
            self.short = nn.Conv2d(into, out, 1, stride, bias=False)

        def forward(self, x: Any) -> Any:
            return (self.last(self.second(self.norm(self.first(x)).relu())) + self.short(x)).relu()

    sizes = [(3, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 2), (256, 256, 1)]
    blocks = nn.Sequential(*[Block(*size) for size in sizes])
    return nn.Sequential(blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def llama() -> Any:
    """Return a language model of transformers with a vocabulary that is most of it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 16384, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, use_cache=False))


def mean_square(output: Any, _: Any) -> Any:
    """Return a loss of numbers."""
    return output.square().mean()


def next_token(output: Any, tokens: Any) -> Any:
    """Return the loss of a language model."""
    import torch

    return torch.nn.functional.cross_entropy(output.float().flatten(0, 1), tokens.flatten())


def classes(output: Any, _: Any) -> Any:
    """Return the loss of a classifier."""
    import torch

    return torch.nn.functional.cross_entropy(output, torch.zeros(len(output), dtype=torch.long))


# ---- predicted -----------------------------------------------------------------------------------------------------


def command(case: str, layout: str, checkpointing: bool, precision: str, passes: int) -> list[str]:
    """Return the command line that predicts."""
    facts, here = CASES[case], Path(__file__).stem
    shape = ["--sample", facts["sample"]] if "sample" in facts else ["--sequence", str(facts["sequence"])]
    return [
        sys.executable, "-W", "ignore", "-m", "accel_plan", "plan", "--train", f"{here}:{case}", "--layout", layout,
        "--batch", str(facts["batch"]), *shape, "--mixed-precision", precision,
        *(["--loss", f"{here}:{facts['loss']}"] if facts["loss"] else ["--chunk-logits"]),
        "--checkpointing", "yes" if checkpointing else "no", "--optimizer", "adamw:foreach=False",
        "--reduce-bucket", str(BUCKET), "--accumulation", str(passes),
    ]  # fmt: skip


def predicted(case: str, layout: str, checkpointing: bool, precision: str, passes: int) -> tuple[int, float]:
    """Return the bytes that are predicted, and the seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        begun = time.perf_counter()
        subprocess.run(
            [*command(case, layout, checkpointing, precision, passes), "--json", str(file)],
            check=True, stdout=subprocess.DEVNULL, cwd=Path(__file__).parent,
        )  # fmt: skip
        seconds = time.perf_counter() - begun
        return json.loads(file.read_text())["layouts"][0]["peak"], seconds


# ---- measured ------------------------------------------------------------------------------------------------------


def accelerator_of(layout: str, precision: str, passes: int) -> Any:
    """Return an Accelerator of this rank on a layout."""
    from accel_core.accelerator import Accelerator
    from accel_core.mesh.layout import MESH_AXES
    from accel_core.mesh.spec import parse_layout
    from accel_core.plugins.parallelism import ParallelismConfig
    from accel_parallel.plugin import FullyShardedDataParallelPlugin

    spec = parse_layout(layout)
    settings: dict[str, Any] = {}
    if spec.engine == "deepspeed":
        from accel_deepspeed.plugin import DeepSpeedPlugin

        zero = {"stage": spec.zero_stage, "reduce_bucket_size": BUCKET}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            # On a CPU, batch norm takes statistics in the dtype of its weights only.
            "data_types": {"buffer_dtype": "bf16" if precision == "bf16" else None},
        }
        settings["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config)
    if spec.engine == "fsdp":
        settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    if spec.engine in ("fsdp", "mesh"):
        settings["parallelism_config"] = ParallelismConfig(**{f"{axis}_size": spec.size(axis) for axis in MESH_AXES})
    return spec, Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=passes, **settings)


def train(case: str, layout: str, checkpointing: bool, precision: str, passes: int, alone: bool) -> dict[str, int]:
    """Train three steps on this rank; return the most bytes of the third."""
    import torch
    from torch.distributed import init_process_group
    from torch.profiler import ProfilerActivity, profile, record_function

    from accel_core.mesh.spec import parse_layout

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if alone and parse_layout(layout).ranks > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        init_process_group("fake", store=FakeStore(), rank=0, world_size=parse_layout(layout).ranks)
    spec, accelerator = accelerator_of(layout, precision, passes)
    facts, before = CASES[case], resident("VmRSS")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        net = globals()[case]()
        if checkpointing:
            recompute_blocks(net)
        if facts["loss"] is None:
            accelerator.chunk_logits(net)
        net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
        each = facts["batch"] // spec.layout().replicas
        # DeepSpeed's engine casts weights, and leaves batches to the loop.
        dtype = torch.bfloat16 if spec.engine == "deepspeed" and precision == "bf16" else None
        for _ in range(3):
            Path("/proc/self/clear_refs").write_text("5")
            with record_function("step"):
                for _ in range(passes):
                    step(accelerator, net, optimizer, facts, each, dtype)
    peak = resident("VmHWM")
    with tempfile.TemporaryDirectory() as folder:
        found.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    last = max(event["ts"] for event in events if event.get("name") == "step" and event.get("ph") == "X")
    sizes = [e["args"]["Total Allocated"] for e in events if e.get("name") == "[memory]" and e["ts"] >= last]
    return {"allocated": max(sizes), "resident": peak - before}


def recompute_blocks(net: Any) -> None:
    """Let the blocks of a model compute activations again, as `activation_checkpointing` of the FSDP plugin does."""
    from accel_parallel.sharding.recomputing import recompute

    blocks = net.model.layers if hasattr(net, "model") else net.blocks if hasattr(net, "blocks") else net[0]
    recompute(blocks, offload=False)


def step(accelerator: Any, net: Any, optimizer: Any, facts: dict[str, Any], batch: int, dtype: Any) -> None:
    """Train on one batch, which may be the last one of a step."""
    import torch

    if "sequence" in facts:
        inputs = torch.zeros((batch, facts["sequence"]), dtype=torch.long)
        context = accelerator.maybe_context_parallel(buffers=[inputs], buffer_seq_dims=[1])
    else:
        inputs = torch.zeros((batch, *map(int, facts["sample"].split("x"))), dtype=dtype)
        context = accelerator.maybe_context_parallel()
    with accelerator.accumulate(net):
        with context:
            if facts["loss"] is None:
                output = net(input_ids=inputs, labels=inputs)
                loss = output.loss
            else:
                output = net(inputs)
                loss = globals()[facts["loss"]](output, inputs)
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def resident(name: str) -> int:
    """Return a count of this process's resident memory, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def measured(
    case: str, layout: str, checkpointing: bool, precision: str, passes: int, alone: bool = False
) -> dict[str, int]:
    """Train on all ranks of a layout, or on the first alone; return the most that one of them had."""
    from accel_core.mesh.spec import parse_layout

    size = 1 if alone else parse_layout(layout).ranks
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(size):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **({} if size == 1 else {k: str(v) for k, v in place.items()}),
        }
        arguments = ["--worker", case, layout, str(int(checkpointing)), precision, str(passes), str(int(alone))]
        command = [sys.executable, "-W", "ignore", __file__, *arguments]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    found = [json.loads(rank.communicate(timeout=300)[0].splitlines()[-1]) for rank in ranks]
    return {name: max(each[name] for each in found) for name in found[0]}


def layout_of_1024() -> float:
    """Return the least milliseconds in which a process learns which rank does what."""
    from accel_core.mesh.spec import parse_layout

    best = float("inf")
    for _ in range(20):
        begun = time.perf_counter()
        layout = parse_layout("hsdp8x16xcp2xtp4").layout(1023)
        assert len(layout.parts) == 1024
        assert len(layout.readers) == layout.replicas == 128
        assert [len(layout.group(axis)) for axis, _ in layout.sizes] == [8, 16, 2, 4]
        best = min(best, 1e3 * (time.perf_counter() - begun))
    return best


def main() -> None:
    """Print the table, or be a rank of a measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="measure what begins with this, such as transformer/fsdp")
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    parser.add_argument("--peer", help="not used")
    args = parser.parse_args()
    if args.worker:
        case, layout, checkpointing, precision, passes, alone = args.worker
        print(json.dumps(train(case, layout, checkpointing == "1", precision, int(passes), alone == "1")))
        return
    rows = [(case, layout, False, "no", 1) for case, layouts in LAYOUTS.items() for layout in layouts]
    rows += [(*name.split("/"), True, "no", 1) for name in CHECKPOINTING]
    rows += [(*name.split("/"), False, "bf16", 1) for name in BF16]
    if find_spec("deepspeed"):
        rows += [(case, layout, False, "no", 1) for case in OWN for layout in ZERO]
        rows += [(case, layout, False, "bf16", 1) for case in OWN for layout in ZERO_BF16]
        rows += [(case, layout, False, "no", PASSES) for case in OWN for layout in ZERO_ACCUMULATED]
        rows += [("transformer", layout, False, "bf16", PASSES) for layout in ZERO_ACCUMULATED]
    columns = ("model", "layout", "predicted, MiB", "program, MiB", "predicted ÷ program", "gloo, MiB",
               "predicted ÷ gloo", "growth of the process, MiB", "predicted in")  # fmt: skip
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    from accel_core.mesh.spec import parse_layout

    worst = 0.0
    for case, layout, checkpointing, precision, passes in rows:
        words = f"{layout}{', checkpointing' * checkpointing}{', bf16' * (precision == 'bf16')}"
        words += f", {passes} passes" * (passes > 1)
        if not f"{case}/{words}".startswith(args.only):
            continue
        expected, seconds = predicted(case, layout, checkpointing, precision, passes)
        engine = parse_layout(layout).engine
        gloo = measured(case, layout, checkpointing, precision, passes)
        # Reductions of DistributedDataParallel are done in place, and it does not take the fake group.
        here = engine in ("single", "ddp")
        program = gloo if here else measured(case, layout, checkpointing, precision, passes, alone=True)
        worst = max(worst, abs(expected / program["allocated"] - 1))
        cells = [case, words, f"{expected / MIB:.1f}"]
        for found in (program, gloo):
            cells += [f"{found['allocated'] / MIB:.1f}", f"{expected / found['allocated']:.3f}"]
        print(f"| {' | '.join(cells)} | {gloo['resident'] / MIB:.0f} | {seconds:.1f} s |", flush=True)
    print(f"| farthest from 1 (reach: ≤ 0.05) | | | | {worst:.4f} | | | | |")
    print(f"| a layout of 1,024 ranks (reach: ≤ 20 ms) | hsdp8x16xcp2xtp4 | | | | | | | {layout_of_1024():.1f} ms |")


if __name__ == "__main__":
    main()
