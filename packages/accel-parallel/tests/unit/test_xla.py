"""XLA devices at the level of what is called, with a stand-in for torch_xla: nothing here ran on such a device."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_core.accelerator import Accelerator
from accel_core.devices import registry as devices
from accel_core.errors import CheckpointError, ConfigurationError, MissingDependencyError, PreparationError
from accel_core.host.environ import patch_environment
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.process.rendezvous import ProcessEnv, locate
from accel_core.strategies.ddp import DataParallelStrategy
from accel_core.strategies.registry import Request, choose
from accel_core.strategies.single import SingleStrategy
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_parallel.xla.strategy import XlaStrategy

pytestmark = pytest.mark.usefixtures("fresh_state")

STAND_INS = Path(__file__).parents[1] / "stand_ins"


@pytest.fixture
def torch_xla(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Put the stand-in for torch_xla on the path, and take it away again."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    import torch_xla

    yield torch_xla
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_xla"]:
        del sys.modules[name]


def test_it_is_chosen_where_the_device_is(torch_xla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_xla's presence chooses it for one process and many; a device that was named, or a variable, wins."""
    assert choose(Request(1)).strategy is choose(Request(8)).strategy is XlaStrategy
    assert not choose(Request(8)).is_engine
    assert choose(Request(1, cpu=True)).strategy is SingleStrategy
    for variables in ({"ACCELERATE_USE_CPU": "1"}, {"ACCELERATE_TORCH_DEVICE": "cpu"}, {"USE_TORCH_XLA": "0"}):
        with patch_environment(**variables):
            assert choose(Request(2)).strategy is DataParallelStrategy


def test_engines_without_xla_are_refused_there(torch_xla: Any) -> None:
    """FSDP of torch, and axes that ranks share, are errors that name the way out; copies are data parallel."""
    with pytest.raises(ConfigurationError, match=r"got the engine 'fsdp'.*USE_TORCH_XLA=0"):
        choose(Request(2, (FullyShardedDataParallelPlugin(),)))
    with pytest.raises(ConfigurationError, match="got the engine 'mesh'"):
        choose(Request(2, parallelism=ParallelismConfig(tp_size=2)))
    with pytest.raises(ConfigurationError, match=r"holds the whole model; got the axes \['tp'\]"):
        XlaStrategy.lay_out(0, 2, ParallelismConfig(tp_size=2), None)
    assert XlaStrategy.lay_out(1, 2, ParallelismConfig(dp_replicate_size=2), None).size("dp_replicate") == 2


def test_the_runtime_says_which_process_this_is(torch_xla: Any) -> None:
    """A process that torch_xla started asks its runtime; the variables of torchrun are believed first."""
    with patch_environment(PJRT_LOCAL_PROCESS_COUNT="4"):
        assert locate() == ProcessEnv(3, 8, 1, 4, "xla")
        with patch_environment(RANK="0", WORLD_SIZE="2"):
            assert locate().source == "torchrun"


def test_the_device_asks_torch_xla(torch_xla: Any) -> None:
    """Place, number, rendezvous and the generator's seed go through torch_xla; the seed is a whole number there."""
    device = devices.named("xla")
    assert (device.place(3), device.count()) == (torch.device("cpu"), 2)
    assert device.group_arguments() == {"init_method": "xla://"}
    state = device.rng_state()
    assert state is not None
    assert state.item() == 7
    device.set_rng_state(torch.tensor(11))
    state = device.rng_state()
    assert state is not None
    assert state.item() == 11


def test_without_the_library_its_use_is_refused_by_name() -> None:
    """The command that installs it is a part of the error."""
    with pytest.raises(MissingDependencyError, match=r"needs torch_xla; got none.*pip install 'torch_xla\[tpu\]'"):
        devices.named("xla").place(0)


def test_one_process_runs_what_it_recorded(torch_xla: Any) -> None:
    """Backward and step each let the device run; an optimizer made before follows parameters that moving replaced."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 1)
    before = model.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model, optimizer = accelerator.prepare(model, optimizer)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert model.weight is not before
    assert optimizer.param_groups[0]["params"][0] is model.weight
    torch_xla.syncs.clear()
    for synced in (False, True):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            assert accelerator.gradient_state.is_xla_gradients_synced is synced
            optimizer.step()
            optimizer.zero_grad()
    assert len(torch_xla.syncs) == 3
    assert not accelerator.gradient_state.is_xla_gradients_synced


def test_a_model_that_torch_xla_shards_trains_as_it_is(torch_xla: Any, tmp_path: Path) -> None:
    """It is neither moved nor averaged, clips itself, comes out of its wrapper, and has no whole state to save."""
    from torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel import XlaFullyShardedDataParallel

    accelerator = Accelerator()
    inner = torch.nn.Linear(2, 1)
    wrapped = XlaFullyShardedDataParallel(inner)
    model, optimizer = accelerator.prepare(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    assert model is wrapped
    assert accelerator.unwrap_model(model) is inner
    accelerator.backward(model(torch.ones(1, 2)).sum())
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    assert wrapped.clipped == [0.5]
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"no whole state on any process.*consolidate_sharded_ckpts"):
        accelerator.save_model(model, tmp_path / "model")
    with pytest.raises(CheckpointError, match="no whole state"):
        accelerator.save_state(tmp_path / "state")
    with pytest.raises(PreparationError, match=r"sharded at 0 only"):
        accelerator.prepare(torch.nn.Sequential(XlaFullyShardedDataParallel(torch.nn.Linear(2, 2))))
