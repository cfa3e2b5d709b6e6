"""Engines of megatron-core on two ranks, beside loops that call megatron-core by hand.

    python benchmarks/megatron.py [--only ROW]

Two gloo ranks, on which a stand-in for CUDA lets megatron-core compute on the CPU (the one of the tests). A step
(forward and backward of two micro batches, clip, optimizer, schedule) of `model(**batch)` and of a loop over
megatron-core's own schedules takes turns; shown is the median of paired ratios. By hand, the loss is averaged over
ranks as Megatron-LM's training loop does it. Accelerate 1.15.0 is no column: it cannot import today's megatron-core.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

from side_by_side import on_ranks, paired_seconds

ROUNDS, STEPS, HOST = 14, 2, 100
LENGTH, SAMPLES, PARTS = 64, 4, 2
STAND_IN = Path(__file__).parents[1] / "packages" / "accel-megatron" / "tests" / "ranks" / "cuda_on_cpu.py"
WAYS = {
    "TP 2": {"tp_degree": 2},
    "PP 2": {"pp_degree": 2},
    "DP 2, distributed optimizer": {"use_distributed_optimizer": True},
}


def prepared(way, width, layers):
    """Return what an Accelerator prepares of a GPT, and one batch of this rank."""
    import torch
    import transformers

    from accel_core.accelerator import Accelerator
    from accel_megatron.plugin import MegatronLMDummyScheduler, MegatronLMPlugin

    plugin = MegatronLMPlugin(num_micro_batches=PARTS, recompute_activations=True, **way)
    accelerator = Accelerator(megatron_lm_plugin=plugin)
    config = transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=4, n_positions=LENGTH, vocab_size=512)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = MegatronLMDummyScheduler(optimizer, total_num_steps=100_000, warmup_num_steps=10)
    ids = torch.randint(0, 512, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    return accelerator, *accelerator.prepare(model, optimizer, schedule), {"input_ids": ids, "labels": ids}


def loops(way, width, layers):
    """Return a step by hand and the accelerated one, of one model."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    accelerator, engine, optimizer, schedule, batch = prepared(way, width, layers)
    tokens = batch["input_ids"]
    labels, mask = torch.roll(tokens, -1, 1), torch.ones(SAMPLES, LENGTH)
    mask[:, -1] = 0
    positions = torch.arange(LENGTH)[None].expand(SAMPLES, -1)
    size = SAMPLES // PARTS

    def loss_func(mask, losses):
        total, count = (losses.float() * mask).sum(), mask.sum()
        return total, count.to(torch.int), {"loss": torch.stack([total.detach(), count])}

    def forward_step(iterator, model):
        part = next(iterator)
        output = model(tokens[part], positions[part], None, labels=labels[part])
        return output, partial(loss_func, mask[part])

    def plain():
        for chunk in engine.module:
            chunk.zero_grad_buffer()
        engine.optimizer.zero_grad()
        reported = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([slice(part * size, (part + 1) * size) for part in range(PARTS)]),
            model=list(engine.module),
            num_microbatches=PARTS,
            seq_length=LENGTH,
            micro_batch_size=size,
            forward_only=False,
        )
        engine.optimizer.step()
        engine.scheduler.step(increment=SAMPLES)
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            mean = torch.stack([part["loss"] for part in reported]).sum(0)
            torch.distributed.all_reduce(mean, group=parallel_state.get_data_parallel_group(with_context_parallel=True))

    def accelerated():
        accelerator.backward(engine(**batch).loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return plain, accelerated


def steps(way):
    """Return the ratio of steps a second."""
    return statistics.median(hand / ours for hand, ours in paired_seconds(*loops(way, 256, 4), ROUNDS, STEPS))


def host(way):
    """Return the microseconds that a step of a small model costs more."""
    return statistics.median(ours - hand for hand, ours in paired_seconds(*loops(way, 32, 2), HOST, 1)) * 1e6


WORK = {function.__name__: function for function in (steps, host)}
ROWS = {
    "steps": ("steps/s ÷ by hand", "{:.3f}", "≥ 0.95"),
    "host": ("added host time per step, µs", "{:.0f}", "—"),
}


def work(name, way):
    """Be one rank, and print what it measured."""
    import torch

    sys.path.remove(str(Path(__file__).resolve().parent))  # where this file has the library's name
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runpy.run_path(str(STAND_IN))["stand_in"]()
    print("\n" + json.dumps(WORK[name](WAYS[way])), flush=True)
    sys.stdout.flush()
    os._exit(0)


def of_first(name, way):
    """Run a measurement on two ranks and return what the first found."""
    return on_ranks(__file__, 2, name, way, stderr=subprocess.DEVNULL, ACCELERATE_USE_CPU="true")[0]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="not used: the peer cannot import this megatron-core")
    parser.add_argument("--only", choices=ROWS, help="measure one row")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(*json.loads(args.work))
        return
    titles = " | ".join(WAYS)
    print(f"| Megatron | {titles} | target |\n|---|{'---|' * len(WAYS)}---|")
    for name in [args.only] if args.only else ROWS:
        title, form, reach = ROWS[name]
        cells = " | ".join(form.format(of_first(name, way)) for way in WAYS)
        print(f"| {title} | {cells} | {reach} |", flush=True)


if __name__ == "__main__":
    main()
