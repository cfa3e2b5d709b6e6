"""Pipelines on gloo ranks, beside a pipeline written by hand with torch.distributed.pipelining.

    python benchmarks/pipelines.py [--only ROW]

Steps: a Llama of transformers, not modified, and two stages of the same layers written by hand as modules, both under
1F1B with as many micro-batches; steps (forward, backward, optimizer) take turns, and the median of paired ratios is
shown.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time

ROUNDS, STEPS, PARTS, ROWS_OF_BATCH, LENGTH = 40, 2, 4, 8, 64


def llama():
    """Return a small Llama of transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 8}
    return LlamaForCausalLM(LlamaConfig(vocab_size=1024, num_hidden_layers=8, use_cache=False, **sizes))


def by_hand(rank, group):
    """Return the parameters of a stage as one writes it for this model alone, and its step."""
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    whole = llama()
    half = len(whole.model.layers) // 2

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.rotary = whole.model.rotary_emb
            self.layers = whole.model.layers[half:] if rank else whole.model.layers[:half]
            if rank:
                self.norm, self.head = whole.model.norm, whole.lm_head
            else:
                self.embed = whole.model.embed_tokens

        def forward(self, values):
            values = values if rank else self.embed(values)
            places = torch.arange(values.shape[1], device=values.device)[None]
            angles = self.rotary(values, places)
            for layer in self.layers:
                values = layer(values, position_ids=places, position_embeddings=angles)
            return self.head(self.norm(values)) if rank else values

    def loss_of(logits, labels):
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

    stage = Stage()
    schedule = Schedule1F1B(PipelineStage(stage, rank, 2, torch.device("cpu"), group=group), PARTS, loss_of)

    def step(ids):
        losses = []
        if rank:
            schedule.step(target=ids, losses=losses, return_outputs=False)
        else:
            schedule.step(ids)
        return losses

    return stage, step


def steps():
    """Compare steps of ours with those of the stages by hand."""
    import torch
    import torch.distributed as dist

    from accel import Accelerator, ParallelismConfig, PipelineKwargs

    settings = PipelineKwargs(microbatches=PARTS, split=["model.layers.4"])
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2), kwargs_handlers=[settings])
    rank, model = accelerator.process_index, llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    stage, hand_step = by_hand(rank, accelerator.torch_device_mesh["pp"].get_group())
    hand_optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-4)
    ids = torch.randint(1024, (ROWS_OF_BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    losses = {}

    def plain():
        found = hand_step(ids)
        losses["plain"] = sum(each.detach() for each in found) / PARTS if found else None
        hand_optimizer.step()
        hand_optimizer.zero_grad()

    def ours():
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        losses["ours"] = loss.detach()
        optimizer.step()
        optimizer.zero_grad()

    def timed(step):
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(STEPS):
            step()
        dist.barrier()
        return (time.perf_counter() - begun) / STEPS

    timed(plain), timed(ours)
    if rank:
        torch.testing.assert_close(losses["plain"], losses["ours"])
    found = []
    for turn in range(ROUNDS):
        times = {step: timed(step) for step in ((plain, ours) if turn % 2 else (ours, plain))}
        found.append((times[plain] / times[ours], times[ours] * 1e3, times[plain] * 1e3))
    return [statistics.median(column) for column in zip(*found, strict=True)]


WORK = {function.__name__: function for function in (steps,)}


def work(name):
    """Be one rank, and print what it measured."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    print("\n" + json.dumps(WORK[name]()), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def ranks(size, name):
    """Run a measurement on some ranks and return what each found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--work", name],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]


def row_of_steps():
    """Return the row of steps."""
    ratio, ours, plain = ranks(2, "steps")[0]
    return f"| steps/s ÷ by hand, Llama on 2 ranks | {ratio:.3f} | {ours:.2f} ms | {plain:.2f} ms | ≥ 0.97 |"


ROWS = {"steps": row_of_steps}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="not used: the peer trains no pipeline on a CPU")
    parser.add_argument("--only", choices=ROWS, help="measure one row")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work)
        return
    print("| pipelines | ratio | accel | by hand, or theory | target |\n|---|---|---|---|---|")
    for name in [args.only] if args.only else ROWS:
        print(ROWS[name](), flush=True)


if __name__ == "__main__":
    main()
