"""Checkpoints of real ranks, continued by others: each sample of an epoch once, or a refusal by name."""

import collections
import json

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from accel_core.accelerator import Accelerator
from accel_core.data.presharded import already_sharded
from accel_core.errors import CheckpointMismatchError
from accel_core.process.world import ensure
from accel_testing.world import run

LENGTH = 26


class Stream(IterableDataset):
    """The numbers from 0 on."""

    def __iter__(self):
        return iter(range(LENGTH))


def prepared(kind):
    """Return an Accelerator with all defaults and its loader."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    if kind == "presharded":
        here = ensure()
        own = DistributedSampler(range(LENGTH), here.size, here.rank, shuffle=False)
        return accelerator, accelerator.prepare(already_sharded(DataLoader(range(LENGTH), batch_size=2, sampler=own)))
    data = DataLoader(Stream(), batch_size=2) if kind == "stream" else DataLoader(range(LENGTH), 2, shuffle=True)
    return accelerator, accelerator.prepare(data)


def note(accelerator, batch, path):
    """Append what all ranks read in this step."""
    rows = accelerator.gather_for_metrics(batch).tolist()
    if accelerator.is_main_process:
        with path.open("a") as file:
            file.write(json.dumps(rows) + "\n")


def save(path, kind, steps):
    """Read some steps and save."""
    accelerator, loader = prepared(kind)
    for step, batch in enumerate(loader, 1):
        note(accelerator, batch, path / "read.jsonl")
        if step == steps or accelerator.gradient_state.end_of_dataloader:
            accelerator.save_state(path / "ckpt")
            break


def go_on(path, kind, steps, refused=False):
    """Load, and read an epoch's rest on these ranks; as many steps at most."""
    accelerator, loader = prepared(kind)
    accelerator.load_state(path / "ckpt")
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


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (3, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_checkpoint_is_continued_by_any_number_of_ranks(kind, before, after, tmp_path):
    """With all defaults, what was read before the save and what is read after the load is each sample once."""
    assert not run(save, before, (tmp_path, kind, 2))
    assert not run(go_on, after, (tmp_path, kind, LENGTH))
    assert counted(tmp_path) == collections.Counter(range(LENGTH))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (3, 2)])
def test_parts_of_ranks_are_refused_by_others(before, after, tmp_path):
    """Ranks that read loaders of their own cannot be continued by others, which say so."""
    assert not run(save, before, (tmp_path, "presharded", 2))
    assert not run(go_on, after, (tmp_path, "presharded", LENGTH, True))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 2), (2, 1)])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_checkpoint_of_a_last_batch_begins_the_next_epoch(kind, before, after, tmp_path):
    """Saved at the last batch of an epoch, the next run's first pass is a whole epoch on every rank."""
    assert not run(save, before, (tmp_path, kind, LENGTH))
    assert counted(tmp_path) == collections.Counter(range(LENGTH))
    assert not run(go_on, after, (tmp_path, kind, LENGTH))
    assert counted(tmp_path) == collections.Counter(list(range(LENGTH)) * 2)
