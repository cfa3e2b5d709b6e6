"""Engines of DeepSpeed on two ranks, beside loops that call DeepSpeed by hand.

    python benchmarks/zero.py [--only ROW]

Two gloo ranks. Steps (forward, backward, clip, optimizer) of one run and of an engine that `deepspeed.initialize` made
by hand take turns; shown is the median of paired ratios. By hand, DeepSpeed clips by its own `gradient_clipping`; the
run calls `clip_grad_norm_`. Added host time is the median of paired differences of a step of a small model, one
process. `prepare` and `deepspeed.initialize` take turns too. Accelerate 1.15.0 is no column: it clips in another place.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
import warnings

from side_by_side import added_microseconds, on_ranks, paired_seconds, report

ROUNDS, STEPS, MADE, HOST = 14, 4, 7, 400
WIDTH, LAYERS, BATCH = 256, 6, 32
STAGES = (1, 2, 3)


def model(width, layers):
    """Return linear layers behind one another."""
    import torch

    torch.manual_seed(0)
    blocks = [each for _ in range(layers) for each in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    return torch.nn.Sequential(*blocks, torch.nn.Linear(width, 10))


def settings(stage, batch, clipping):
    """Return DeepSpeed's configuration."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clipping,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def by_hand(stage, net, batch):
    """Return an engine that DeepSpeed made."""
    import deepspeed
    import torch

    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=settings(stage, batch, 1.0))[0]


def prepared(accelerator, net):
    """Return a model and its optimizer, prepared."""
    import torch

    return accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))


def begun(stage, batch):
    """Return an Accelerator."""
    from accel_core.accelerator import Accelerator
    from accel_deepspeed.plugin import DeepSpeedPlugin

    return Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings(stage, batch, 0.0)))


def loops(stage, width, layers, batch):
    """Return a step by hand and the accelerated one, of equal models."""
    import torch

    x, y = torch.randn(batch, width), torch.randint(10, (batch,))
    accelerator = begun(stage, batch)
    net, optimizer = prepared(accelerator, model(width, layers))
    hand = by_hand(stage, model(width, layers), batch)

    def plain():
        hand.backward(torch.nn.functional.cross_entropy(hand(x), y))
        hand.step()

    def accelerated():
        with accelerator.accumulate(net):
            accelerator.backward(torch.nn.functional.cross_entropy(net(x), y))
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return plain, accelerated


def steps(stage):
    """Return the ratio of steps a second."""
    times = paired_seconds(*loops(stage, WIDTH, LAYERS, BATCH), ROUNDS, STEPS)
    return statistics.median(hand / ours for hand, ours in times)


def made(stage):
    """Return the milliseconds by which `prepare` takes longer than `deepspeed.initialize`."""
    import torch.distributed as dist

    accelerator = begun(stage, BATCH)
    makers = (lambda net: by_hand(stage, net, BATCH), lambda net: prepared(accelerator, net))
    longer = []
    for turn in range(MADE + 1):
        times = {}
        for maker in makers if turn % 2 else reversed(makers):
            net = model(WIDTH, LAYERS)
            dist.barrier()
            start = time.perf_counter()
            maker(net)
            dist.barrier()
            times[maker] = time.perf_counter() - start
            accelerator.free_memory()
        longer.append(times[makers[1]] - times[makers[0]])
    return statistics.median(longer[1:]) * 1e3


def host(stage):
    """Return the microseconds that a step of a small model costs more, in one process."""
    return added_microseconds(*loops(stage, 8, 4, 2), HOST)


WORK = {function.__name__: function for function in (steps, made, host)}
ROWS = {
    "steps": ("steps/s ÷ by hand", 2, "{:.3f}", "≥ 0.98"),
    "made": ("added time of prepare, ms", 2, "{:.0f}", "≤ 50"),
    "host": ("added host time per step, µs", 1, "{:.0f}", "≤ 60"),
}


def work(name, stage):
    """Be one rank, and print what it measured."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    report(WORK[name], stage)


def of_first(size, name, stage):
    """Run a measurement on some ranks and return what the first found."""
    return on_ranks(__file__, size, name, stage, stderr=subprocess.DEVNULL, DS_ACCELERATOR="cpu")[0]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="not used: the peer clips and steps in another place")
    parser.add_argument("--only", choices=ROWS, help="measure one row")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(*json.loads(args.work))
        return
    titles = " | ".join(f"ZeRO {stage}" for stage in STAGES)
    print(f"| DeepSpeed | {titles} | target |\n|---|{'---|' * len(STAGES)}---|")
    for name in [args.only] if args.only else ROWS:
        title, size, form, reach = ROWS[name]
        cells = " | ".join(form.format(of_first(size, name, stage)) for stage in STAGES)
        print(f"| {title} | {cells} | {reach} |", flush=True)


if __name__ == "__main__":
    main()
