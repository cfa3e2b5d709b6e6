"""Who comes to a save: every rank, or in scripts written for Accelerate the main one alone where each holds copies."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_core.accelerator import Accelerator
from accel_core.comm.objects import gather_object
from accel_core.errors import RankDisagreementError
from accel_core.plugins import fsdp
from accel_core.plugins.parallelism import ParallelismConfig, TorchTensorParallelConfig
from accel_core.plugins.project import ProjectConfiguration
from accel_testing import requires, world


class Training:
    """A small run that trains on numbers drawn from torch's own generator, which each rank seeds differently."""

    def __init__(self, seed: int = 1, model: nn.Module | None = None, **arguments: Any) -> None:
        torch.manual_seed(seed)
        self.accelerator = Accelerator(cpu=True, **arguments)
        model = model or nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        torch.manual_seed(100 * seed + self.accelerator.process_index)
        random.seed(100 * seed + self.accelerator.process_index)

    def step(self, batches: int = 1) -> None:
        """Train one batch, or several."""
        for _ in range(batches):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(torch.rand(2, 4)).pow(2).sum())
                self.optimizer.step()
                self.optimizer.zero_grad()

    def weights(self) -> list[float]:
        """Return the weights of this rank."""
        value: torch.Tensor = self.accelerator.unwrap_model(self.model).weight
        return value.flatten().tolist()


def draw() -> tuple[float, float]:
    """Return a number of each generator."""
    return torch.rand(1).item(), random.random()


GOING_ON: dict[str, Callable[[Training], Any]] = {
    "backward": lambda own: own.step(),
    "gather": lambda own: own.accelerator.gather(torch.ones(2)),
    "raw collective": lambda own: dist.all_reduce(torch.ones(2)),
}


def as_the_drop_in() -> None:
    """Save as scripts written for Accelerate expect."""
    ProjectConfiguration.meets = staticmethod(lambda: False)


@pytest.mark.parametrize("following", GOING_ON)
@world(2)
def test_main_saves_alone_while_others_go_on(following: str, tmp_path: Path) -> None:
    """Whatever the others do next, nothing waits, the save is complete, and the folder loads on all ranks."""
    as_the_drop_in()
    own = Training()
    own.step()
    saved = own.weights()
    if own.accelerator.is_main_process:
        for _ in range(2):
            own.accelerator.save_state(str(tmp_path / "ckpt"))
    drawn = draw()
    GOING_ON[following](own)
    own.step()
    own.accelerator.wait_for_everyone()
    other = Training(seed=2)
    report = other.accelerator.load_state(str(tmp_path / "ckpt"))
    assert other.weights() == saved
    assert (report.world_size, report.absent, report.reseeded) == (2, 1, [1])
    numbers = gather_object([draw()])
    assert (numbers[0] == drawn) is own.accelerator.is_main_process
    assert len(set(numbers)) == 2


@world(2)
def test_ranks_that_save_apart_keep_their_random_states(tmp_path: Path) -> None:
    """Where the others call save_state too, each puts its states there, in any order and without a meeting."""
    as_the_drop_in()
    own = Training()
    for late in (0, 1):
        own.step()
        if own.accelerator.process_index == late:
            own.accelerator.save_state(str(tmp_path / "ckpt"))
        dist.barrier()
        if own.accelerator.process_index != late:
            own.accelerator.save_state(str(tmp_path / "ckpt"))
        saved, drawn = own.weights(), draw()
        other = Training(seed=2)
        report = other.accelerator.load_state(str(tmp_path / "ckpt"))
        assert (other.weights(), draw()) == (saved, drawn)
        assert report.reseeded == []
        dist.barrier()


@world(2)
def test_pruning_takes_what_ranks_put_there_themselves(tmp_path: Path) -> None:
    """With total_limit nothing of an older checkpoint stays, as the list of another rank's random states."""
    as_the_drop_in()
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    own = Training(project_config=config)
    for _ in range(2):
        own.step()
        dist.barrier()
        if not own.accelerator.is_main_process:
            own.accelerator.save_state()
        dist.barrier()
        if own.accelerator.is_main_process:
            own.accelerator.save_state()
    dist.barrier()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_1"]


@world(2)
def test_random_states_of_another_step_are_not_taken(tmp_path: Path) -> None:
    """A rank that saved at an earlier step only is seeded anew, and a warning says so."""
    as_the_drop_in()
    own = Training()
    own.step()
    own.accelerator.save_state(str(tmp_path / "ckpt"))
    stale = draw()
    own.step()
    if own.accelerator.is_main_process:
        own.accelerator.save_state(str(tmp_path / "ckpt"))
    dist.barrier()
    report = own.accelerator.load_state(str(tmp_path / "ckpt"))
    assert report.reseeded == [1]
    assert draw() != stale


@world(2)
def test_hooks_of_scripts_run_on_the_rank_that_saves(tmp_path: Path) -> None:
    """One that writes the model in its own way and takes it from the list is called on rank 0 alone, until removed."""
    as_the_drop_in()
    own = Training()
    called: list[int] = []

    def write(models: list[Any], weights: list[Any], folder: str) -> None:
        called.append(own.accelerator.process_index)
        for model in models:
            torch.save(own.accelerator.unwrap_model(model).state_dict(), os.path.join(folder, "own.pt"))
            weights.pop()

    def read(models: list[Any], folder: str) -> None:
        while models:
            state = torch.load(os.path.join(folder, "own.pt"), weights_only=True)
            own.accelerator.unwrap_model(models.pop()).load_state_dict(state)

    handles = own.accelerator.register_save_state_pre_hook(write), own.accelerator.register_load_state_pre_hook(read)
    saved = own.weights()
    if own.accelerator.is_main_process:
        own.accelerator.save_state(str(tmp_path / "ckpt"))
    own.step()
    assert called == [0] * own.accelerator.is_main_process
    own.accelerator.load_state(str(tmp_path / "ckpt"))
    assert own.weights() == saved
    assert sorted(os.listdir(tmp_path / "ckpt"))[-2:] == ["own.pt", "random_states_0.pkl"]
    for handle in handles:
        handle.remove()
    own.accelerator.save_state(str(tmp_path / "plain"))
    own.accelerator.load_state(str(tmp_path / "plain"))
    assert called == [0] * own.accelerator.is_main_process


def parted(kind: str) -> Training:
    """Return a run, trained one step, of whose model each rank holds a part."""
    if kind == "tp":
        plan = TorchTensorParallelConfig(tp_plan={"0": "colwise", "1": "rowwise"})
        axes = ParallelismConfig(tp_size=2, tp_handler=plan)
        own = Training(model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), parallelism_config=axes)
    else:
        version = int(kind.removeprefix("fsdp"))
        plugin = fsdp.FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy="no_wrap")
        own = Training(fsdp_plugin=plugin)
    torch.manual_seed(3)  # ranks of tensor parallel train on the same batch
    own.step()
    return own


@requires("accel_parallel")
@pytest.mark.parametrize("kind", ["copies", "fsdp1", "fsdp2", "tp", "shards of the drop-in"])
@pytest.mark.parametrize("absent", [0, 1])
@world(2)
def test_a_rank_that_does_not_come_is_named(kind: str, absent: int, tmp_path: Path) -> None:
    """The others raise within the limit, the folder is as it was, and the next save of all ranks is complete."""
    if "drop-in" in kind:
        as_the_drop_in()
    own = Training() if kind == "copies" else parted(kind if kind in ("fsdp1", "tp") else "fsdp2")
    own.accelerator.save_state(str(tmp_path / "ckpt"))
    before = {path: path.read_bytes() for path in (tmp_path / "ckpt").rglob("*") if path.is_file()}
    own.step()
    if own.accelerator.process_index != absent:
        expected = (
            rf"save_state was not called on every rank; rank {absent} did not come within 1 s .*Call save_state on"
        )
        with pytest.raises(RankDisagreementError, match=expected):
            own.accelerator.save_state(str(tmp_path / "ckpt"), timeout=1)
    own.step()
    assert {path: path.read_bytes() for path in (tmp_path / "ckpt").rglob("*") if path.is_file()} == before
    own.accelerator.wait_for_everyone()
    own.accelerator.save_state(str(tmp_path / "ckpt"))
    own.accelerator.load_state(str(tmp_path / "ckpt"))


@world(2)
@pytest.mark.parametrize("compiled", [False, True])
def test_hooks_get_the_model_that_was_prepared(tmp_path: Path, compiled: bool) -> None:
    """Save and load hooks see the user's own models, not their wrappers; what a load hook takes out is not loaded."""
    accelerator = Accelerator(cpu=True, **({"dynamo_backend": "eager"} if compiled else {}))
    own = [nn.Linear(2, 2), nn.Linear(3, 3)]
    prepared = [accelerator.prepare(model) for model in own]
    assert all(type(model) is not nn.Linear for model in prepared)
    before = [model.weight.detach().clone() for model in own]
    seen: list[bool] = []

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        seen.append([*map(id, models)] == [*map(id, own)])

    def load(models: list[Any], folder: str) -> None:
        seen.append([*map(id, models)] == [*map(id, own)])
        models.pop()

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    accelerator.save_state(str(tmp_path / "saved"))
    with torch.no_grad():
        for model in own:
            model.weight.zero_()
    accelerator.load_state(str(tmp_path / "saved"))
    assert seen == [True, True]
    assert torch.equal(own[0].weight, before[0])
    assert not own[1].weight.any()
