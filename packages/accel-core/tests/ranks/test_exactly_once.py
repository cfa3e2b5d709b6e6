"""Checkpoints of real ranks, continued by others: each sample of an epoch once, or a refusal by name."""

import collections
import json

import pytest
import torch
from streams import Stream
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from accel_core.accelerator import Accelerator
from accel_core.data.presharded import already_sharded
from accel_core.errors import CheckpointMismatchError
from accel_core.process.world import ensure
from accel_testing.world import run

LENGTH = 26


def prepared(kind):
    """Return an Accelerator with all defaults, a model with its optimizer, and a loader."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    model = torch.nn.Linear(1, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    if kind == "presharded":
        here = ensure()
        own = DistributedSampler(range(LENGTH), here.size, here.rank, shuffle=False)
        data = already_sharded(DataLoader(range(LENGTH), batch_size=2, sampler=own))
        return accelerator, model, optimizer, accelerator.prepare(data)
    data = DataLoader(Stream(LENGTH), batch_size=2) if kind == "stream" else DataLoader(range(LENGTH), 2, shuffle=True)
    return accelerator, model, optimizer, accelerator.prepare(data)


def held(accelerator, model, optimizer):
    """Return weights and moments."""
    return {"model": accelerator.unwrap_model(model).state_dict(), "moments": optimizer.state_dict()["state"]}


def note(accelerator, batch, path):
    """Append what all ranks read in this step."""
    rows = accelerator.gather_for_metrics(batch).tolist()
    if accelerator.is_main_process:
        with path.open("a") as file:
            file.write(json.dumps(rows) + "\n")


def save(path, kind, steps):
    """Train some steps and save."""
    accelerator, model, optimizer, loader = prepared(kind)
    for step, batch in enumerate(loader, 1):
        note(accelerator, batch, path / "read.jsonl")
        accelerator.backward(model(batch.float()[:, None]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == steps or accelerator.gradient_state.end_of_dataloader:
            accelerator.save_state(path / "ckpt")
            break
    if accelerator.is_main_process:
        torch.save(held(accelerator, model, optimizer), path / "held.pt")


def go_on(path, kind, steps, refused=False):
    """Load weights and moments, and read an epoch's rest on these ranks; as many steps at most."""
    accelerator, model, optimizer, loader = prepared(kind)
    accelerator.load_state(path / "ckpt")
    expected = torch.load(path / "held.pt", weights_only=True)
    torch.testing.assert_close(held(accelerator, model, optimizer), expected, rtol=0, atol=0)
    if refused:
        with pytest.raises(CheckpointMismatchError, match="depends on who reads"):
            next(iter(loader))
        return
    for _, batch in zip(range(steps), loader, strict=False):
        note(accelerator, batch, path / "read.jsonl")


def counted(path):
    """Return how often each sample was read."""
    lines = (path / "read.jsonl").read_text().splitlines()
    return collections.Counter(sample for line in lines for sample in json.loads(line))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (3, 2), (4, 1), (2, 4), (3, 3)])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_checkpoint_is_continued_by_any_number_of_ranks(kind, before, after, tmp_path):
    """With all defaults weights come back, and what is read before the save and after the load is each sample once."""
    run(save, before, (tmp_path, kind, 2))
    run(go_on, after, (tmp_path, kind, LENGTH))
    assert counted(tmp_path) == collections.Counter(range(LENGTH))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (3, 2)])
def test_parts_of_ranks_are_refused_by_others(before, after, tmp_path):
    """Ranks that read loaders of their own cannot be continued by others, which say so."""
    run(save, before, (tmp_path, "presharded", 2))
    run(go_on, after, (tmp_path, "presharded", LENGTH, True))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 2), (2, 1)])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_checkpoint_of_a_last_batch_begins_the_next_epoch(kind, before, after, tmp_path):
    """Saved at the last batch of an epoch, the next run's first pass is a whole epoch on every rank."""
    run(save, before, (tmp_path, kind, LENGTH))
    assert counted(tmp_path) == collections.Counter(range(LENGTH))
    run(go_on, after, (tmp_path, kind, LENGTH))
    assert counted(tmp_path) == collections.Counter(list(range(LENGTH)) * 2)
