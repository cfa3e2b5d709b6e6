"""Adapters of PEFT alone in a checkpoint: `save_state(parts=("adapters",))`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_core.accelerator import Accelerator
from accel_core.checkpoint.load import load_state
from accel_core.checkpoint.run import BareRun
from accel_core.checkpoint.save import save_state
from accel_core.errors import CheckpointMismatchError
from accel_core.mesh.tensor import whole
from accel_core.state import reset_all
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_testing import requires, world

peft = pytest.importorskip("peft")


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Leave no state of the process to other tests."""
    reset_all()
    yield
    reset_all()


def peft_run(seed: int, targets: tuple[str, ...] = ("0",)) -> BareRun:
    """Return a run of a model with adapters of PEFT; the base is the same for every seed."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False)
    return BareRun([peft.get_peft_model(base, config)])


def test_adapters_alone_are_saved_and_loaded(tmp_path: Path) -> None:
    """`parts=("adapters",)` writes what PEFT added; it is loaded into the same base, which stays as it is."""
    run = peft_run(1)
    save_state(run, tmp_path / "adapters", parts=("adapters",))
    stored = load_file(tmp_path / "adapters" / "model.safetensors")
    assert stored
    assert all("lora_" in name for name in stored)
    other = peft_run(2)
    report = load_state(other, tmp_path / "adapters")
    assert (report.part, report.findings) == ("adapters", [])
    expected, found = run.models[0].state_dict(), other.models[0].state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """A run with further adapters, or without any, is not loaded from those, and nothing changes."""
    save_state(peft_run(1), tmp_path / "adapters", parts=("adapters",))
    other = peft_run(2, targets=("0", "1"))
    before = {name: value.clone() for name, value in other.models[0].state_dict().items()}
    for run in (other, BareRun([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))])):
        with pytest.raises(CheckpointMismatchError, match="is not in the checkpoint"):
            load_state(run, tmp_path / "adapters")
    assert all(torch.equal(value, before[name]) for name, value in other.models[0].state_dict().items())


def trained(model: nn.Module, accelerator: Accelerator | None = None) -> nn.Module:
    """Return a model after one step, of adapters that FSDP2 shards if there is an accelerator."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward() if accelerator is None else accelerator.backward(loss)
    optimizer.step()
    return model


def save_sharded_and_load_back(kind: str, folder: str) -> None:
    """Save the adapters of a sharded model, change all of it, and load them: the rest stays changed."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = trained(peft_run(1).models[0], accelerator)
    before = {name: whole(value).clone() for name, value in model.state_dict().items()}
    accelerator.save_state(folder, parts=("adapters",))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    report = accelerator.load_state(folder)
    assert (report.part, report.findings) == ("adapters", [])
    for name, value in model.state_dict().items():
        expected = before[name] if "lora_" in name else torch.full_like(before[name], 7.0)
        assert torch.equal(whole(value), expected), name


@requires("torch:2.8")  # the first that computes in shards on a CPU
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_adapters_of_a_sharded_model_are_those_of_one_process(tmp_path: Path, kind: str) -> None:
    """What two ranks save of a model in shards, one process loads, and finds what it trains itself."""
    world(2)(save_sharded_and_load_back)(kind, str(tmp_path / "adapters"))
    expected, other = trained(peft_run(1).models[0]).state_dict(), peft_run(2)
    report = load_state(other, tmp_path / "adapters")
    assert (report.part, report.findings) == ("adapters", [])
    for name, value in other.models[0].state_dict().items():
        torch.testing.assert_close(value, expected[name])
