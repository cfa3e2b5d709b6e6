"""Shards of more ranks than tell one another every file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from accel_core.accelerator import Accelerator
from accel_core.checkpoint import names
from accel_core.checkpoint.shards import open_weights
from accel_core.comm import transport
from accel_core.errors import CheckpointDamagedError
from accel_core.mesh.tensor import whole
from accel_core.testing import world
from accel_core.testing.world import run
from accel_parallel.checkpoint.merge import merge_weights
from accel_parallel.plugin import FullyShardedDataParallelPlugin


def build(seed: int) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    """Return a model in shards, on ranks that agree as more than 64 do."""
    transport._FRAMES_UPTO = 1  # the process ends with the test
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def train(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step."""
    accelerator.backward(model(torch.ones(2, 4)).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return whole weights; every rank calls it."""
    return {name: whole(value).clone() for name, value in model.state_dict().items()}


@world(2, quiet=15)
def test_a_sharded_save_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save gathers plans and places, later ones nothing, until the part of a rank is another."""
    accelerator, model, optimizer = build(1)
    gathered, gather = [], transport.Transport.all_gather
    monkeypatch.setattr(transport.Transport, "all_gather", lambda *args: (gathered.append(args), gather(*args))[1])

    def gathers() -> bool:
        gathered.clear()
        accelerator.save_state(tmp_path / "ckpt")
        return bool(gathered)

    assert gathers()
    assert not gathers()
    train(accelerator, model, optimizer)  # from here on, the optimizer has a state
    assert gathers()
    train(accelerator, model, optimizer)
    assert not gathers()
    expected = values(model)
    train(accelerator, model, optimizer)
    assert accelerator.load_state(tmp_path / "ckpt").findings == []
    assert all(torch.equal(value, expected[name]) for name, value in values(model).items())


def save_here(folder: Path) -> None:
    """Save on some ranks."""
    accelerator, model, optimizer = build(1)
    train(accelerator, model, optimizer)
    accelerator.save_state(folder)
    expected = values(model)
    if accelerator.is_main_process:
        torch.save(expected, folder.with_name("expected.pt"))


def load_here(folder: Path) -> None:
    """Load on others."""
    accelerator, model, _ = build(2)
    accelerator.load_state(folder)
    expected = torch.load(folder.with_name("expected.pt"))
    assert all(torch.equal(value, expected[name]) for name, value in values(model).items())


def test_other_ranks_and_commands_read_all_lists(tmp_path: Path) -> None:
    """Two ranks and `merge_weights` read what four saved; a list that is lost is named by both."""
    folder = tmp_path / "ckpt"
    assert run(save_here, 4, (folder,), quiet=15) is None
    assert run(load_here, 2, (folder,), quiet=15) is None
    merge_weights(folder / "pytorch_model_fsdp_0", tmp_path / "merged")
    merged, expected = open_weights(tmp_path / "merged"), torch.load(tmp_path / "expected.pt")
    assert all(torch.equal(merged.read(name), value) for name, value in expected.items())
    (folder / names.list_name(3)).unlink()
    failure = run(load_here, 2, (folder,), quiet=15)
    assert failure is not None
    assert f"{names.list_name(3)} is missing" in failure
    with pytest.raises(CheckpointDamagedError, match=r"3\.json is missing"):
        merge_weights(folder / "pytorch_model_fsdp_0", tmp_path / "again")
