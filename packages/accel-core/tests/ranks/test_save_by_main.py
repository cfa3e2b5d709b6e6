"""`save_state` by rank 0 alone, as in `if accelerator.is_main_process`, while the other ranks go on."""

import atexit
import os
import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_core._torch import default_store
from accel_core.accelerator import Accelerator
from accel_core.checkpoint.manifest import Manifest
from accel_core.checkpoint.tensor_file import SpreadWeight
from accel_core.comm import roll_call, transport
from accel_core.comm.objects import gather_object
from accel_core.errors import RankDisagreementError, RemoteRankError
from accel_core.host import environ
from accel_core.plugins import fsdp
from accel_core.plugins.loading import DataLoaderConfiguration
from accel_core.plugins.parallelism import ParallelismConfig, TorchTensorParallelConfig
from accel_core.plugins.project import ProjectConfiguration
from accel_core.process import world as process_world
from accel_core.testing import limits, requires, world


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

    def save_by_main(self, target: Path) -> list[float]:
        """Save on rank 0 alone, and return this rank's weights as they are now."""
        if self.accelerator.is_main_process:
            assert self.accelerator.save_state(str(target)) == target
        return self.weights()


def draw() -> tuple[float, float]:
    """Return a number of each generator."""
    return torch.rand(1).item(), random.random()


def evaluate(own: Training) -> None:
    """Compute alone for a while, and then train."""
    with torch.no_grad():
        for _ in range(200):
            own.model.module(torch.ones(2, 4))
    own.step()


GOING_ON: dict[str, Callable[[Training], Any]] = {
    "backward": lambda own: own.step(),
    "gather": lambda own: own.accelerator.gather(torch.ones(2)),
    "wait_for_everyone": lambda own: own.accelerator.wait_for_everyone(),
    "evaluation": evaluate,
    "raw collective": lambda own: dist.all_reduce(torch.ones(2)),
}


@pytest.mark.parametrize("following", GOING_ON)
@world(2)
def test_rank_0_saves_alone_while_the_others_go_on(following: str, tmp_path: Path) -> None:
    """Whatever the others do next, the save is complete, training goes on, and a load continues from it."""
    own = Training()
    own.step()
    saved = own.save_by_main(tmp_path / "ckpt")
    own.save_by_main(tmp_path / "ckpt")
    drawn = draw()
    GOING_ON[following](own)
    own.step()
    again = own.save_by_main(tmp_path / "later")
    own.accelerator.wait_for_everyone()
    assert gather_object([own.weights()])[0] == own.weights() == again != saved
    other = Training(seed=2)
    report = other.accelerator.load_state(str(tmp_path / "ckpt"))
    assert other.weights() == saved
    assert (report.world_size, report.absent, report.reseeded) == (1, 1, [1])
    numbers = gather_object([draw()])
    assert (numbers[0] == drawn) is own.accelerator.is_main_process
    assert len(set(numbers)) == 2
    other.accelerator.load_state(str(tmp_path / "later"))
    assert other.weights() == again


@world(2, environment={"ACCELERATE_DEBUG_MODE": "true"})
def test_rank_0_saves_alone_in_debug_mode(tmp_path: Path) -> None:
    """In debug mode ranks wait before a collective, which shows where they are as well."""
    own = Training()
    saved = own.save_by_main(tmp_path / "ckpt")
    own.accelerator.wait_for_everyone()
    own.step()
    own.accelerator.load_state(str(tmp_path / "ckpt"))
    assert own.weights() == saved


@world(3)
def test_a_joint_save_follows_saves_by_rank_0(tmp_path: Path) -> None:
    """Saves by rank 0 leave a save of all ranks as it is, with the random states of each, whoever comes last."""
    for late in range(3):
        own = Training(seed=late)
        own.step()
        own.save_by_main(tmp_path / "alone")
        own.step()
        if own.accelerator.process_index == late:
            evaluate_alone = nn.Linear(64, 64)
            for _ in range(50):
                evaluate_alone(torch.ones(64, 64))
        own.accelerator.save_state(str(tmp_path / f"joint{late}"))
        saved, drawn = own.weights(), draw()
        own.save_by_main(tmp_path / "alone")
        own.step()
        report = own.accelerator.load_state(str(tmp_path / f"joint{late}"))
        assert (own.weights(), draw()) == (saved, drawn)
        assert (report.world_size, report.absent, report.reseeded) == (3, 0, [])


@world(2)
def test_rank_0_saves_inside_an_accumulation_window(tmp_path: Path) -> None:
    """Batches without a reduction show nothing; the batch that ends the window does."""
    own = Training(gradient_accumulation_steps=3)
    own.step()
    saved = own.save_by_main(tmp_path / "ckpt")
    own.step(batches=2)
    assert own.weights() != saved
    own.accelerator.load_state(str(tmp_path / "ckpt"))
    assert own.weights() == saved


@world(2)
def test_rank_0_saves_when_the_others_have_ended(tmp_path: Path) -> None:
    """A rank that left the process group is waited for no more, in one save and in the next."""
    own = Training()
    own.step()
    if own.accelerator.is_main_process:
        own.save_by_main(tmp_path / "ckpt")
        own.save_by_main(tmp_path / "last")
    own.accelerator.end_training()
    for name in ("ckpt", "last") if own.accelerator.is_main_process else ():
        manifest = Manifest.read(tmp_path / name)
        assert manifest is not None
        assert (manifest.world_size, manifest.absent, manifest.damages(tmp_path / name)) == (1, 1, {})
    assert not [each for each in threading.enumerate() if each.name == "accel-roll-call"]


@world(2)
def test_rank_0_saves_alone_in_the_background(tmp_path: Path) -> None:
    """`blocking=False` needs no other rank either, and a joint save in the background can follow."""
    own = Training()
    saved = own.weights()
    if own.accelerator.is_main_process:
        own.accelerator.save_state(str(tmp_path / "alone"), blocking=False)
    own.step()
    joint = own.weights()
    own.accelerator.save_state(str(tmp_path / "joint"), blocking=False)
    own.step()
    own.accelerator.load_state(str(tmp_path / "joint"))
    assert own.weights() == joint
    own.accelerator.load_state(str(tmp_path / "alone"))
    assert own.weights() == saved


@world(2)
def test_numbered_saves_by_rank_0_and_by_all_form_one_series(tmp_path: Path) -> None:
    """Absent ranks did not count the saves by rank 0, and agree with it on the next number all the same."""
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=3)
    own = Training(project_config=project)
    for _ in range(2):
        if own.accelerator.is_main_process:
            own.accelerator.save_state()
        own.step()
    own.accelerator.save_state()
    if own.accelerator.is_main_process:
        own.accelerator.save_state()
    own.step()
    folder = own.accelerator.save_state()
    assert folder.name == "checkpoint_4"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_2", "checkpoint_3", "checkpoint_4"]
    assert own.accelerator.load_state().folder.name == "checkpoint_4"


@world(2)
def test_hooks_of_scripts_run_on_the_rank_that_saves(tmp_path: Path) -> None:
    """A hook that writes the model in its own way and takes it from the list is called on rank 0 alone."""
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

    own.accelerator.register_save_state_pre_hook(write)
    own.accelerator.register_load_state_pre_hook(read)
    saved = own.save_by_main(tmp_path / "ckpt")
    own.step()
    assert called == [0] * own.accelerator.is_main_process
    own.accelerator.load_state(str(tmp_path / "ckpt"))
    assert own.weights() == saved
    assert sorted(os.listdir(tmp_path / "ckpt"))[-2:] == ["own.pt", "random_states_0.pkl"]


def reduced(**arguments: Any) -> Training:
    """Return a run that has trained one step."""
    own = Training(**arguments)
    own.step()
    return own


@requires("accel_parallel")
@world(4)
def test_rank_0_saves_alone_on_a_mesh_of_replicas(tmp_path: Path) -> None:
    """Gradients that are averaged in groups of the mesh show that a rank has gone on to a later collective."""
    own = reduced(parallelism_config=ParallelismConfig(dp_replicate_size=2, cp_size=2))
    saved = own.save_by_main(tmp_path / "ckpt")
    own.step()
    own.accelerator.load_state(str(tmp_path / "ckpt"))
    assert own.weights() == saved


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
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "tp"])
@world(2)
def test_rank_0_cannot_save_shards_alone(kind: str, tmp_path: Path) -> None:
    """Where each rank holds a part, rank 0 is refused by name, nothing is written, and the run goes on."""
    own = parted(kind)
    if own.accelerator.is_main_process:
        expected = (
            r"each holds a part of what is saved; got rank 0 there, and not rank 1: has gone on to a later collective"
        )
        with pytest.raises(RankDisagreementError, match=expected):
            own.accelerator.save_state(str(tmp_path / "ckpt"))
    own.step()
    assert not os.listdir(tmp_path)
    own.accelerator.save_state(str(tmp_path / "ckpt"))
    own.accelerator.load_state(str(tmp_path / "ckpt"))


@pytest.mark.parametrize("callers", [{1}, {0, 1}])
@world(3)
def test_some_ranks_but_not_all_are_refused(callers: set[int], tmp_path: Path) -> None:
    """A save by another rank than 0, or by several but not all, is an error on each that called; the run goes on."""
    own = reduced()
    if own.accelerator.process_index in callers:
        there = "rank 1" if callers == {1} else "ranks 0, 1"
        with pytest.raises(
            RankDisagreementError, match=rf"got {there} there, and not ranks? .*2: has gone on to a later collective"
        ):
            own.accelerator.save_state(str(tmp_path / "ckpt"))
    own.step()
    assert not os.listdir(tmp_path)
    own.accelerator.save_state(str(tmp_path / "ckpt"))


@requires("accel_parallel")
@world(2)
def test_shards_saved_by_rank_0_while_the_others_wait_are_refused_on_all_ranks(tmp_path: Path) -> None:
    """Where the others wait in an operation of accel's, all ranks learn where each of them is."""
    own = reduced(fsdp_plugin=fsdp.FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap"))
    with pytest.raises(RankDisagreementError, match=r"(?s)rank 0: save_state at.*rank 1: wait_for_everyone at"):
        own.save_by_main(tmp_path / "ckpt") if own.accelerator.is_main_process else own.accelerator.wait_for_everyone()
    assert not os.listdir(tmp_path)


@world(3)
def test_messages_between_two_ranks_do_not_count(tmp_path: Path) -> None:
    """The count of torch includes what two ranks send one another; the third still saves with them."""
    own = reduced()
    for _ in range(3):
        if own.accelerator.process_index in (1, 2):
            dist.send(torch.ones(1), 2) if own.accelerator.process_index == 1 else dist.recv(torch.ones(1), 1)
    own.accelerator.gather(torch.ones(1))
    own.accelerator.save_state(str(tmp_path / "ckpt"))
    assert own.accelerator.load_state(str(tmp_path / "ckpt")).world_size == 3


@pytest.mark.parametrize("slow", ["inside", "behind"])
@world(3)
def test_a_slow_rank_that_was_sent_more_than_the_others_is_waited_for(slow: str, tmp_path: Path) -> None:
    """Where a weight is sent to rank 0 it begins more than the others, and comes to the same save."""
    own = reduced()
    rank = own.accelerator.process_index

    def gathered() -> torch.Tensor:
        value = torch.ones(1)
        for sender in (1, 2):
            dist.recv(value, sender) if rank == 0 else dist.send(value, 0) if rank == sender else None
        time.sleep(0.3 if rank == 0 and slow == "inside" else 0)
        return value

    SpreadWeight((1,), torch.float32, gathered)()
    time.sleep(0.3 if rank == 0 and slow == "behind" else 0)
    own.accelerator.save_state(str(tmp_path / "ckpt"))
    if rank == 0:
        found = roll_call.call(own.accelerator._runtime.world, "a test")
        assert found == dict.fromkeys((1, 2), "has gone on to a later collective")
    SpreadWeight((1,), torch.float32, gathered)()


@world(3)
def test_what_some_ranks_gathered_for_metrics_does_not_count(tmp_path: Path) -> None:
    """A rank that has no last batch saves first, and waits for those that gathered from theirs without it."""
    run = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader = run.prepare(DataLoader(TensorDataset(torch.arange(5.0)), batch_size=1))
    batches = [batch for (batch,) in loader if len(run.gather_for_metrics(batch))]
    time.sleep(0.3 * (len(batches) == 2))
    run.save_state(str(tmp_path / "ckpt"))


class LateToAsk:
    """A store in which a rank asks where the others are only after another one has called."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_set(self, key: str, expected: str, wanted: str) -> Any:
        """Wait before a question."""
        if wanted == "ask":
            assert limits.wait_until(lambda: self._store.check([key]))
        return self._store.compare_set(key, expected, wanted)


@world(2)
def test_a_rank_that_asks_too_late_comes_to_the_save_of_the_other(tmp_path: Path) -> None:
    """A rank that waits in a frame for long may begin to ask when the other one has come and calls the next save."""
    own = reduced()
    roll = roll_call.start(own.accelerator._runtime.world)
    assert roll is not None
    if own.accelerator.is_main_process:
        roll._store = LateToAsk(roll._store)
        transport._PATIENCE = timedelta(milliseconds=1)
    else:
        time.sleep(0.3)
    own.accelerator.wait_for_everyone()
    transport._PATIENCE = timedelta(minutes=1)
    own.accelerator.save_state(str(tmp_path / "ckpt"))
    assert own.accelerator.load_state(str(tmp_path / "ckpt")).world_size == 2


@world(2)
def test_a_rank_without_a_sign_is_named(tmp_path: Path) -> None:
    """When the group's timeout has passed, the error names the rank of which nothing was heard."""
    own = reduced()
    store = default_store()
    if own.accelerator.is_main_process:
        roll = roll_call.start(own.accelerator._runtime.world)
        assert roll is not None
        roll._patience = timedelta(0)
    else:
        store.wait(["given up"])
    with pytest.raises(RemoteRankError, match=r"called on some ranks, and rank 1 neither came nor showed"):
        own.accelerator.save_state(str(tmp_path / "ckpt"))
    if own.accelerator.is_main_process:
        roll._patience = timedelta(minutes=1)
        store.set("given up", "")
    assert not os.listdir(tmp_path)
    own.accelerator.save_state(str(tmp_path / "ckpt"))
    assert own.accelerator.load_state(str(tmp_path / "ckpt")).world_size == 2


@world(2)
def test_a_forked_process_answers_no_calls(tmp_path: Path) -> None:
    """What a forked process does when it ends leaves the calls to the process that it was forked from."""
    own = reduced()
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()
        os._exit(0)
    assert limits.wait_for_fork(child) == 0
    own.accelerator.save_state(str(tmp_path / "ckpt"))
    assert own.accelerator.load_state(str(tmp_path / "ckpt")).world_size == 2


@pytest.mark.parametrize("leave", [process_world.destroy, dist.destroy_process_group])
@world(2)
def test_another_process_group_has_calls_of_its_own(leave: Callable[[], None], tmp_path: Path) -> None:
    """When a process group was left, by torch's own function too, and another one made, calls begin anew."""
    for name in ("first", "second"):
        own = reduced()
        saved = own.save_by_main(tmp_path / name)
        own.step()
        own.accelerator.load_state(str(tmp_path / name))
        assert own.weights() == saved
        assert len([each for each in threading.enumerate() if each.name == "accel-roll-call"]) == 1
        if name == "first":
            own.accelerator.wait_for_everyone()
            meeting = environ.text("ACCELERATE_DEBUG_RDV_FILE")
            leave()
            environ.write("ACCELERATE_DEBUG_RDV_FILE", f"{meeting}-again")
            own.accelerator.state._reset_state(reset_partial_state=True)


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
