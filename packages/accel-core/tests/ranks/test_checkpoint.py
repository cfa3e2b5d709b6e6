"""Saving and restoring with several ranks."""

import os
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_core.accelerator import Accelerator
from accel_core.checkpoint import background, pickles, preemption
from accel_core.checkpoint.load import load_state
from accel_core.checkpoint.run import BareRun
from accel_core.checkpoint.save import save_state
from accel_core.comm.objects import gather_object
from accel_core.errors import (
    AccelError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigurationError,
    RankDisagreementError,
)
from accel_core.process.world import ensure
from accel_testing import world


def build(seed: int) -> BareRun:
    """Return a small run whose parameters are the same on all ranks and whose random states are not."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    own = BareRun([model], [optimizer], step=seed)
    torch.manual_seed(seed * 100 + own.world.rank)
    random.seed(seed * 100 + own.world.rank)
    return own


def raised(call: Any, *args: Any, kind: type[AccelError] = CheckpointError, **kwargs: Any) -> tuple[str, str]:
    """Return class and text of the error that a call raises."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    return type(caught.value).__name__, str(caught.value)


def everywhere(value: Any) -> list[Any]:
    """Gather a value from all ranks."""
    values: list[Any] = gather_object([value])
    return values


@world(2)
def test_a_hook_that_deletes_the_folder_fails_on_all_ranks(tmp_path: Path) -> None:
    """Rank 0 alone looks at what hooks wrote; where it cannot, nobody waits for it, and the next save is made."""
    own = build(1)
    if own.world.is_main:
        own.save_state_pre_hooks[0] = lambda models, weights, output_dir: shutil.rmtree(output_dir)
    errors = everywhere(raised(save_state, own, tmp_path / "ckpt"))
    assert errors[0] == errors[1]
    assert "FileNotFoundError" in errors[0][1]
    own.save_state_pre_hooks.clear()
    assert save_state(own, tmp_path / "ckpt") == tmp_path / "ckpt"


@world(2)
def test_each_rank_gets_its_own_random_states_back(tmp_path: Path) -> None:
    """Parameters are shared, random states are each rank's own; what was saved can be loaded at once, in one set."""
    for number in range(5):
        own = build(number)
        save_state(own, tmp_path / "ckpt")
        load_state(build(9), tmp_path / "ckpt")
    own = build(1)
    save_state(own, tmp_path / "ckpt")
    expected = (torch.rand(1).item(), random.random())
    other = build(2)
    load_state(other, tmp_path / "ckpt")
    assert (torch.rand(1).item(), random.random()) == expected
    assert torch.equal(own.models[0].weight, other.models[0].weight)
    assert len(set(everywhere(expected))) == 2
    assert os.listdir(tmp_path / "ckpt" / "accel_manifest") == ["1.json"]
    assert sorted(os.listdir(tmp_path / "ckpt")) == [
        "accel_manifest",
        "accel_manifest.json",
        "accel_progress.json",
        "model.safetensors",
        "optimizer.bin",
        "random_states_0.pkl",
        "random_states_1.pkl",
    ]


@world(2)
def test_a_failure_of_one_rank_is_the_error_of_all(tmp_path: Path) -> None:
    """Writing fails on rank 1: both ranks raise the same, what was there is intact, and both can go on."""
    own = build(1)
    save_state(own, tmp_path / "ckpt")
    write = pickles.write_object

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    if own.world.rank == 1:
        pickles.write_object = full  # type: ignore[assignment]
    errors = everywhere(raised(save_state, build(2), tmp_path / "ckpt"))
    pickles.write_object = write
    assert errors[0] == errors[1]
    assert "rank 1: OSError: [Errno 28] No space left on device" in errors[0][1]
    assert os.listdir(tmp_path) == ["ckpt"]
    other = build(3)
    load_state(other, tmp_path / "ckpt")
    assert torch.equal(own.models[0].weight, other.models[0].weight)
    save_state(other, tmp_path / "ckpt")


class Unwilling(nn.Linear):
    """Something registered that cannot take its state back."""

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Fail."""
        raise RuntimeError("no")


@pytest.mark.parametrize("failing", [{0, 1}, {1}])
@world(2)
def test_a_restore_that_fails_names_its_component_on_all_ranks(failing: set[int], tmp_path: Path) -> None:
    """Whether all ranks fail alike or one does, all name folder, component, what was restored, and what to do."""
    own = build(1)
    own.custom_objects.append(nn.Linear(2, 2))
    save_state(own, tmp_path / "ckpt")
    other = build(2)
    other.custom_objects.append((Unwilling if other.world.rank in failing else nn.Linear)(2, 2))
    errors = everywhere(raised(load_state, other, tmp_path / "ckpt"))
    assert errors[0] == errors[1]
    assert "its registered object 0 could not be restored; got RuntimeError: no." in errors[0][1]
    assert "Restored before it: model 0, optimizer 0." in errors[0][1]
    assert str(tmp_path / "ckpt") in errors[0][1]
    assert "start the run again" in errors[0][1]
    assert ("rank 1: " in errors[0][1]) is (failing == {1})


@world(2)
def test_damage_that_one_rank_meets_is_refused_by_all(tmp_path: Path) -> None:
    """The random states of one rank are damaged, or each file is removed in turn: one error, and no change."""
    save_state(build(1), tmp_path / "ckpt")
    listed = [path.relative_to(tmp_path / "ckpt") for path in (tmp_path / "ckpt").rglob("*") if path.is_file()]
    for name in sorted(map(str, listed)):
        other = build(2)
        weight, state = other.models[0].weight.clone(), torch.get_rng_state()
        dist.barrier()
        path, raw = tmp_path / "ckpt" / name, (tmp_path / "ckpt" / name).read_bytes()
        for harmed in (None, raw[:-3], raw[:5] + bytes([raw[5] ^ 4]) + raw[6:]):
            dist.barrier()
            if other.world.rank == 0:
                path.unlink(missing_ok=True)
                if harmed is not None:
                    path.write_bytes(harmed)
            dist.barrier()
            errors = everywhere(raised(load_state, other, tmp_path / "ckpt"))
            assert errors[0] == errors[1]
            assert errors[0][0] == CheckpointDamagedError.__name__
            assert name in errors[0][1] or "manifest" in errors[0][1]
            assert torch.equal(other.models[0].weight, weight)
            assert torch.equal(torch.get_rng_state(), state)
        dist.barrier()
        if other.world.rank == 0:
            path.write_bytes(raw)
        dist.barrier()
    load_state(build(2), tmp_path / "ckpt")


@world(2)
def test_a_mismatch_on_one_rank_is_refused_by_all(tmp_path: Path) -> None:
    """If the model of one rank differs, no rank is changed, and the error says which rank it is."""
    save_state(build(1), tmp_path / "ckpt")
    other = build(2)
    if other.world.rank == 1:
        other.models[0] = nn.Linear(3, 2)
    weight = other.models[0].weight.clone()
    errors = everywhere(raised(load_state, other, tmp_path / "ckpt"))
    assert errors[0] == errors[1]
    assert errors[0][0] == CheckpointMismatchError.__name__
    assert "weight has shape (3, 3) instead of (2, 3) (rank 1)" in errors[0][1]
    assert torch.equal(other.models[0].weight, weight)


@world(2)
def test_background_saves_do_not_disturb_collectives_of_training(tmp_path: Path) -> None:
    """While the thread writes and agrees, the ranks go on reducing gradients."""
    write = pickles.write_object

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return write(*args, **kwargs)

    pickles.write_object = slow  # type: ignore[assignment]
    own = build(1)
    weight = own.models[0].weight.clone()
    handle = save_state(own, tmp_path / "ckpt", blocking=False)
    with torch.no_grad():
        own.models[0].weight.add_(1)
    for number in range(50):
        total = torch.tensor([float(number + own.world.rank)])
        dist.all_reduce(total)
        assert total.item() == 2 * number + 1
    assert handle.wait() == tmp_path / "ckpt"
    dist.barrier()
    other = build(2)
    load_state(other, tmp_path / "ckpt")
    assert torch.equal(other.models[0].weight, weight)
    background.finish()


@world(2)
def test_nodes_without_a_common_disk_get_a_folder_each(tmp_path: Path) -> None:
    """With save_on_each_node every disk has its own complete checkpoint and manifest; without it, its ranks' files."""
    own = build(1)
    own.world = replace(own.world, local_rank=0, local_size=1)
    disk = tmp_path / f"node{own.world.rank}"
    own.project.save_on_each_node = True
    save_state(own, disk / "ckpt")
    rank = own.world.rank
    assert f"random_states_{rank}.pkl" in os.listdir(disk / "ckpt")
    assert f"random_states_{1 - rank}.pkl" not in os.listdir(disk / "ckpt")
    other = build(2)
    other.world = own.world
    load_state(other, disk / "ckpt")
    assert torch.equal(own.models[0].weight, other.models[0].weight)
    own.project.save_on_each_node = False
    kind, text = raised(save_state, own, disk / "second")
    assert kind == CheckpointError.__name__
    assert "save_on_each_node=True" in text


@world(2)
def test_ranks_that_load_different_checkpoints_are_refused(tmp_path: Path) -> None:
    """Each rank names another folder: the same error everywhere, with who has what, and no rank is changed."""
    for number in range(2):
        save_state(build(number), tmp_path / f"ckpt{number}")
    other = build(5)
    weight = other.models[0].weight.clone()
    errors = everywhere(raised(load_state, other, tmp_path / f"ckpt{other.world.rank}"))
    assert errors[0] == errors[1]
    assert errors[0][0] == CheckpointMismatchError.__name__
    assert "rank 1: " in errors[0][1]
    assert "got save " in errors[0][1]
    if other.world.rank == 0:
        for name in ("accel_manifest.json", "accel_progress.json"):
            (tmp_path / "ckpt0" / name).unlink()
    dist.barrier()
    errors = everywhere(raised(load_state, other, tmp_path / f"ckpt{other.world.rank}"))
    assert errors[0] == errors[1]
    assert "and no manifest on the main rank" in errors[0][1]
    assert torch.equal(other.models[0].weight, weight)
    load_state(other, tmp_path / "ckpt1")


@world(2)
def test_ranks_that_disagree_on_positions_are_refused(tmp_path: Path) -> None:
    """One rank that restores the position of loaders and one that does not: both raise, and nothing is changed."""
    own, other = build(1), build(2)
    save_state(own, tmp_path / "ckpt")
    weight = other.models[0].weight.clone()
    other.data.restore_position = other.world.rank == 0
    with pytest.raises(ConfigurationError, match=r"got restore_position=\[True, False\], by rank"):
        load_state(other, tmp_path / "ckpt")
    assert torch.equal(other.models[0].weight, weight)


@world(2)
def test_what_all_ranks_meet_is_said_once(tmp_path: Path) -> None:
    """The first run of a script that loads the newest checkpoint: one sentence on all ranks, without their list."""
    own = build(1)
    own.project.set_directories(str(tmp_path))
    errors = everywhere(raised(load_state, own, tmp_path / "nothing"))
    assert errors[0] == errors[1]
    assert errors[0][1].startswith("No checkpoint at")
    own.project.automatic_checkpoint_naming = True
    errors = everywhere(raised(load_state, own))
    assert errors[0] == errors[1]
    assert errors[0][0] == "CheckpointNotFoundError"
    assert errors[0][1].startswith("There is no complete checkpoint_<number>")
    with pytest.raises(CheckpointNotFoundError) as caught:
        load_state(own, tmp_path / "nothing")
    assert caught.value.__cause__ is None  # a traceback that shows the error once
    assert "rank 0:" not in errors[0][1]
    own.project.automatic_checkpoint_naming = False
    with pytest.raises(ConfigurationError, match=r"^load_state was not given a folder"):
        load_state(own)
    assert os.listdir(tmp_path) == []


@world(2)
def test_a_signal_to_one_rank_is_known_to_all(tmp_path: Path) -> None:
    """All ranks learn of a preemption at the same step."""
    ensure()
    preemption.watch()
    assert not preemption.requested()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 15)
    assert preemption.requested()
    preemption.unwatch()


def facade(seed: int) -> tuple[Accelerator, Any, Any, Any]:
    """Return an Accelerator with a prepared model, optimizer and shuffled loader, whose worker persists."""
    torch.manual_seed(seed)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.arange(48.0)[:, None])
    # A rank is itself a child of a fork server, and its workers would each import torch again.
    workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader = DataLoader(data, batch_size=2, shuffle=True, **workers)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def train(accelerator: Accelerator, model: Any, optimizer: Any, batches: Any, limit: int | None = None) -> list[int]:
    """Train and return which samples this rank saw."""
    seen: list[int] = []
    for number, (batch,) in enumerate(batches):
        seen += [int(value) for value in batch.flatten()]
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        if limit is not None and number + 1 == limit:
            break
    return seen


@world(2)
def test_the_middle_of_an_epoch_is_resumed_exactly(tmp_path: Path) -> None:
    """With worker processes that persist: straight and interrupted runs see the same samples and end bit-equal."""
    accelerator, model, optimizer, loader = facade(1)
    straight = [train(accelerator, model, optimizer, loader) for _ in range(2)]
    weight = accelerator.unwrap_model(model).weight.clone()
    accelerator, model, optimizer, loader = facade(1)
    first = train(accelerator, model, optimizer, loader, limit=5)
    accelerator.save_state(str(tmp_path / "ckpt"))
    accelerator, model, optimizer, loader = facade(2)
    accelerator.load_state(str(tmp_path / "ckpt"))
    rest = train(accelerator, model, optimizer, loader)
    second = train(accelerator, model, optimizer, loader)
    assert [first + rest, second] == straight
    assert torch.equal(accelerator.unwrap_model(model).weight, weight)


@world(2)
def test_ranks_that_save_different_parts_are_refused(tmp_path: Path) -> None:
    """Where one rank saves the model alone, or all name no part that there is, every rank raises and writes nothing."""
    run = build(1)
    _, text = raised(save_state, run, tmp_path / "part", parts=("x",), kind=ConfigurationError)
    assert "got ['x']" in text
    assert len(set(everywhere(text))) == 1
    own = ("model",) if run.world.rank else None
    _, text = raised(save_state, run, tmp_path / "part", parts=own, kind=RankDisagreementError)
    assert "save_state(parts=['model'])" in text
    assert not (tmp_path / "part").exists()


@world(2)
def test_ranks_save_a_part_together(tmp_path: Path) -> None:
    """A model alone is saved and loaded by several ranks, whose random states stay as they are."""
    save_state(build(1), tmp_path / "part", parts=("model",))
    other = build(2)
    before = torch.get_rng_state()
    assert load_state(other, tmp_path / "part").restored == ["model 0"]
    assert torch.equal(other.models[0].weight, build(1).models[0].weight)
    torch.set_rng_state(before)
    assert sorted(os.listdir(tmp_path / "part")) == ["accel_manifest.json", "accel_parts.json", "model.safetensors"]
