"""A disk that becomes full during a save: an error on all ranks, the previous checkpoint intact, training goes on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_core.checkpoint import folder
from accel_core.checkpoint.run import BareRun
from accel_core.errors import CheckpointError
from accel_core.testing import requires
from accel_core.testing.world import run

SIZE = 4 << 20


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


def build(value: float, width: int) -> BareRun:
    """Return a run with a model of `width` x `width` numbers."""
    model = nn.Linear(width, width, bias=False)
    nn.init.constant_(model.weight, value)
    return BareRun([model], [torch.optim.SGD(model.parameters(), lr=0.1)])


def fill_the_disk(disk: Path, blocking: bool) -> None:
    """Save a small state, fail to save a large one, go on training, and save again when there is room."""
    first = build(1.0, 64)
    folder.save_state(first, disk / "ckpt")
    own = build(2.0, 1200)

    def attempt() -> Any:
        saved = folder.save_state(own, disk / "ckpt", blocking=blocking)
        return saved if blocking else saved.wait()

    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        attempt()
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1
    assert os.listdir(disk) == ["ckpt"]
    restored = build(3.0, 64)
    folder.load_state(restored, disk / "ckpt")
    assert torch.equal(restored.models[0].weight, first.models[0].weight)
    own.models[0](torch.ones(1, 1200)).sum().backward()
    own.optimizers[0].step()
    smaller = build(4.0, 300)
    folder.save_state(smaller, disk / "ckpt")
    restored = build(5.0, 300)
    folder.load_state(restored, disk / "ckpt")
    assert torch.equal(restored.models[0].weight, smaller.models[0].weight)


@requires("user:root", "program:mount")
@pytest.mark.parametrize("blocking", [True, False])
def test_disk_full_during_a_save(blocking: bool, small_disk: Path) -> None:
    """Both ranks raise the same error, and everything else goes on."""
    assert (run(fill_the_disk, 2, (small_disk, blocking)) or "") == ""


@requires("user:root", "program:mount")
def test_a_mount_point_is_saved_into(small_disk: Path, fresh_state: None) -> None:
    """A folder that cannot be exchanged for another takes one checkpoint after the other, and keeps foreign files."""
    (small_disk / "notes.txt").write_text("mine")
    for value in (1.0, 2.0):
        saved = build(value, 64)
        folder.save_state(saved, small_disk)
        restored = build(3.0, 64)
        folder.load_state(restored, small_disk)
        assert torch.equal(restored.models[0].weight, saved.models[0].weight)
        assert not [name for name in os.listdir(small_disk) if name.startswith(".")]
    assert (small_disk / "notes.txt").read_text() == "mine"
