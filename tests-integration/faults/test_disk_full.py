"""A disk that becomes full during a save: an error on all ranks, the previous checkpoint intact, training goes on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_core.accelerator import Accelerator
from accel_core.checkpoint.load import load_state
from accel_core.checkpoint.run import BareRun
from accel_core.checkpoint.save import save_state
from accel_core.errors import CheckpointError
from accel_core.mesh.tensor import local_part
from accel_core.state import reset_all
from accel_parallel import fsdp_files
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_testing import requires, world

SIZE = 4 << 20
SHARDS = "SHARDED_STATE_DICT"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a filesystem of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs to mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def build(value: float, width: int, sharded: bool = False) -> Any:
    """Return a run with a model of `width` x `width` numbers, whole or in shards."""
    model = nn.Linear(width, width, bias=False)
    nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not sharded:
        return BareRun([model], [optimizer])
    reset_all()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=SHARDS)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.prepare(model, optimizer)
    return accelerator._runtime


def same(one: Any, other: Any) -> bool:
    """Return whether this rank holds the same weights of two runs."""
    return torch.equal(local_part(one.models[0].weight), local_part(other.models[0].weight))


def refusal(save: Callable[[], object]) -> None:
    """Make sure that a save finds no room, and that all ranks say the same."""
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        save()
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1


@requires("user:root", "program:mount")
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("blocking", [True, False])
@world(2)
def test_disk_full_during_a_save(blocking: bool, sharded: bool, small_disk: Path) -> None:
    """Both ranks raise the same error, and everything else goes on; also where each writes its shard."""
    first = build(1.0, 64, sharded)
    save_state(first, small_disk / "ckpt")
    own = build(2.0, 1200, sharded)

    def attempt() -> Any:
        saved = save_state(own, small_disk / "ckpt", blocking=blocking)
        return saved if blocking else saved.wait()

    refusal(attempt)
    assert os.listdir(small_disk) == ["ckpt"]
    restored = build(3.0, 64, sharded)
    load_state(restored, small_disk / "ckpt")
    assert same(restored, first)
    own.models[0](torch.ones(1, 1200)).sum().backward()
    own.optimizers[0].step()
    smaller = build(4.0, 300, sharded)
    save_state(smaller, small_disk / "ckpt")
    restored = build(5.0, 300, sharded)
    load_state(restored, small_disk / "ckpt")
    assert same(restored, smaller)


@requires("user:root", "program:mount")
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", SHARDS])
@world(2)
def test_disk_full_while_one_model_is_saved(kind: str, small_disk: Path) -> None:
    """Both ranks raise the same error, nothing is left of the attempt, and the model of before is loaded."""
    first, own, restored = build(1.0, 64, True), build(2.0, 1200, True), build(3.0, 64, True)
    fsdp_files.save_model(kind, first.models[0], small_disk, 0, adapter_only=False)
    before = sorted(os.listdir(small_disk))
    refusal(lambda: fsdp_files.save_model(kind, own.models[0], small_disk, 0, adapter_only=False))
    assert sorted(os.listdir(small_disk)) == before
    fsdp_files.load_model(kind, restored.models[0], small_disk, 0, adapter_only=False)
    assert same(restored, first)


@requires("user:root", "program:mount")
def test_a_mount_point_is_saved_into(small_disk: Path, fresh_state: None) -> None:
    """A folder that cannot be exchanged for another takes one checkpoint after the other, and keeps foreign files."""
    (small_disk / "notes.txt").write_text("mine")
    for value in (1.0, 2.0):
        saved = build(value, 64)
        save_state(saved, small_disk)
        restored = build(3.0, 64)
        load_state(restored, small_disk)
        assert torch.equal(restored.models[0].weight, saved.models[0].weight)
        assert not [name for name in os.listdir(small_disk) if name.startswith(".")]
    assert (small_disk / "notes.txt").read_text() == "mine"
