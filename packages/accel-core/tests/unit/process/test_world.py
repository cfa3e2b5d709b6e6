"""The process group of a run: joined where it is needed, with a backend for what it has to move."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from accel_core.accelerator import Accelerator
from accel_core.errors import ConfigurationError
from accel_core.host.environ import patch_environment
from accel_core.process import world
from accel_core.process.world import GroupNeeds
from accel_core.state import AcceleratorState, PartialState
from accel_core.strategies import registry
from accel_core.strategies.single import SingleStrategy

pytestmark = pytest.mark.usefixtures("fresh_state")


class Alone(SingleStrategy):
    """A strategy that works with a process group even on one process."""

    name = "alone"

    @classmethod
    def group_needs(cls, plugin: object) -> GroupNeeds:
        """Ask for a group."""
        return GroupNeeds(alone=True, host=True)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the strategy be chosen by its name."""
    monkeypatch.setattr(registry, "_registered", {"alone": Alone})
    with patch_environment(ACCELERATE_STRATEGY="alone"):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("state_first", [False, True])
def test_one_process_gets_a_group_where_the_strategy_needs_it(state_first: bool) -> None:
    """It works, both views name its backend, also those that were there before, and the end of training leaves it."""
    if state_first:
        assert PartialState().backend is None
    accelerator = Accelerator()
    assert (accelerator.num_processes, accelerator.use_distributed) == (1, False)
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0]
    assert accelerator.state.backend == PartialState().backend == "gloo"
    assert Accelerator()._runtime.world is accelerator._runtime.world
    accelerator.end_training()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("device", "backend", "needs", "chosen"),
    [
        ("cuda", "nccl", GroupNeeds(host=True), "cuda:nccl,cpu:gloo"),
        ("xpu", "xccl", GroupNeeds(alone=True, host=True), "xpu:xccl,cpu:gloo"),
        ("cuda", "nccl", GroupNeeds(alone=True), "nccl"),
        ("cuda", "gloo", GroupNeeds(host=True), "gloo"),
        ("cuda", "cuda:nccl,cpu:mpi", GroupNeeds(host=True), "cuda:nccl,cpu:mpi"),
        ("cpu", "gloo", GroupNeeds(host=True), "gloo"),
    ],
)
def test_offloaded_tensors_get_a_backend(device: str, backend: str, needs: GroupNeeds, chosen: str) -> None:
    """A device's own backend is joined by one for the CPU; what moves both already, or was chosen by hand, stays."""
    assert world._backend_for(device, backend, needs) == chosen


@pytest.mark.usefixtures("alone")
def test_a_group_that_cannot_move_offloaded_tensors_is_refused() -> None:
    """A group that somebody joined before, for devices only, is named, and no state of a run is left behind."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ConfigurationError, match=r"offloaded.*; got .*InitProcessGroupKwargs"):
        Accelerator()
    assert AcceleratorState._shared_state == {}


def test_one_copy_of_a_run_speaks_for_it() -> None:
    """Where another world trains a copy, no process of this one is the main one, for users and inside."""
    accelerator = Accelerator(cpu=True)
    try:
        world.lead(False)
        mains = (accelerator.is_main_process, accelerator.is_local_main_process, PartialState().is_main_process)
        assert not any((*mains, PartialState().is_local_main_process, world.ensure().is_main, world.leading()))
    finally:
        world.lead(True)
    assert accelerator.is_main_process
    assert world.ensure().is_local_main


@pytest.mark.parametrize(
    ("wanted", "cpu", "refused"),
    [("cpu:1", False, r"device 'cpu:1' is not one .*; got 1.*\[0\]"), ("cpu", False, ""), ("xpu:7", True, "")],
)
def test_a_device_that_is_named_is_taken_or_refused(
    wanted: str, cpu: bool, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the process does not see is refused with its number; `cpu=True` in the code wins over the variable."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", wanted)
    if refused:
        with pytest.raises(ConfigurationError, match=refused):
            Accelerator(cpu=cpu)
    else:
        assert Accelerator(cpu=cpu).device == torch.device("cpu")


def test_a_run_on_the_cpu_is_not_bound_near_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors near the GPU of the process's number are asked for only where the process computes on a GPU."""
    bound: list[int] = []
    monkeypatch.setattr(world, "set_numa_affinity", bound.append)
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", "1")
    accelerator = Accelerator(cpu=True)
    assert accelerator.device.type == "cpu"
    assert bound == []
    assert accelerator.state.backend is None, "one process needs no group"
    assert not dist.is_initialized()
