"""Pipelines on gloo ranks, beside a pipeline written by hand with torch.distributed.pipelining.

    python benchmarks/pipelines.py [--only ROW]

Steps: a Llama of transformers, not modified, and two stages of the same layers written by hand as modules, both under
1F1B with as many micro-batches; steps (forward, backward, optimizer) take turns, and the median of paired ratios is
shown. Memory: the most that tensors of a step have at a time, on the rank where that is worse, compared with what has
to be there: weights and gradients of the stage by hand, what it keeps of each micro-batch in flight but one, and the
peak of that one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from side_by_side import on_ranks, report

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


def memory():
    """Return the peak of a step over what has to be there."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from accel import Accelerator, ParallelismConfig, PipelineKwargs

    class Watch(TorchDispatchMode):
        def __init__(self, module):
            super().__init__()
            self.weights = {StorageWeakRef(each.untyped_storage()) for each in module.parameters()}
            self.sizes, self.most = {}, 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for each in tree_leaves(result):
                if type(each) in (torch.Tensor, torch.nn.Parameter) and not each.is_meta:
                    self.sizes[StorageWeakRef(each.untyped_storage())] = each.untyped_storage().nbytes()
            self.most = max(self.most, self.now())
            return result

        def now(self):
            self.sizes = {each: size for each, size in self.sizes.items() if not each.expired()}
            return sum(size for each, size in self.sizes.items() if each not in self.weights)

    settings = PipelineKwargs(microbatches=PARTS, split=["model.layers.4"])
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2), kwargs_handlers=[settings])
    rank = accelerator.process_index
    model = accelerator.prepare(llama())
    ids = torch.randint(1024, (ROWS_OF_BATCH, LENGTH), generator=torch.Generator().manual_seed(1))

    def step():
        accelerator.backward(model(input_ids=ids, labels=ids).loss)

    step()
    model.zero_grad()
    with Watch(model) as ours:
        step()
    stage, _ = by_hand(rank, accelerator.torch_device_mesh["pp"].get_group())
    part = ids[: ROWS_OF_BATCH // PARTS]
    given = torch.randn(*part.shape, 256, requires_grad=True) if rank else part
    with Watch(stage) as hand:
        for _ in range(2):  # the second while the gradients of the first are there
            before, hand.most = hand.now(), 0
            made = stage(given)
            if rank:
                made = torch.nn.functional.cross_entropy(made[:, :-1].flatten(0, 1).float(), part[:, 1:].flatten())
            kept = hand.now() - before
            made.backward(torch.ones_like(made))
            del made
    weights = sum(each.nbytes for each in stage.parameters())
    flying = 2 - rank  # micro-batches that a rank keeps under 1F1B
    needed = weights + hand.most + (flying - 1) * kept
    return [(weights + ours.most) / needed, (weights + ours.most) / 2**20, needed / 2**20]


WORK = {function.__name__: function for function in (steps, memory)}


def row_of_steps():
    """Return the row of steps."""
    ratio, ours, plain = on_ranks(__file__, 2, "steps")[0]
    return f"| steps/s ÷ by hand, Llama on 2 ranks | {ratio:.3f} | {ours:.2f} ms | {plain:.2f} ms | ≥ 0.97 |"


def row_of_memory():
    """Return the row of memory."""
    ratio, ours, needed = max(on_ranks(__file__, 2, "memory"))
    title = "peak memory of a step ÷ stage and micro-batches in flight"
    return f"| {title} | {ratio:.3f} | {ours:.1f} MiB | {needed:.1f} MiB | ≤ 1.05 |"


ROWS = {"steps": row_of_steps, "memory": row_of_memory}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="not used: the peer trains no pipeline on a CPU")
    parser.add_argument("--only", choices=ROWS, help="measure one row")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        report(WORK[json.loads(args.work)[0]])
        return
    print("| pipelines | ratio | accel | by hand | target |\n|---|---|---|---|---|")
    for name in [args.only] if args.only else ROWS:
        print(ROWS[name](), flush=True)


if __name__ == "__main__":
    main()
