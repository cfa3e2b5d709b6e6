"""Deciding a run: plugins by one door, a second Accelerator, and what users see of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from accel_core.accelerator import Accelerator
from accel_core.devices.cpu import CpuDevice
from accel_core.errors import ConfigurationError, DeviceUnavailableError
from accel_core.extension import Extension
from accel_core.host.environ import patch_environment
from accel_core.mesh.layout import Layout
from accel_core.options import engines as table
from accel_core.options.enums import DistributedType
from accel_core.plugins.handlers import KwargsHandler, MeterKwargs
from accel_core.random import set_seed
from accel_core.state import AcceleratorState, PartialState
from accel_core.strategies import registry
from accel_core.strategies.registry import register_strategy
from accel_core.strategies.single import SingleStrategy

pytestmark = pytest.mark.usefixtures("fresh_state")

FLAGS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")


class Noting(Extension):
    """Notes the borders that a run comes to."""

    def __init__(self, runtime: Any) -> None:
        super().__init__(runtime)
        self.seen: list[str] = []

    def keep_model(self, model: Any) -> None:
        """Note a model."""
        self.seen.append("model")

    def keep_loader(self, loader: Any) -> None:
        """Note a loader."""
        self.seen.append("loader")

    def read(self, loader: Any, batches: Any) -> Any:
        """Note each batch."""
        for batch in batches:
            self.seen.append("batch")
            yield batch

    def backward(self, run: Any, *given: Any) -> None:
        """Note a backward pass."""
        self.seen.append("backward")
        run(*given)

    def step(self, run: Any, optimizer: Any, closure: Any) -> Any:
        """Note a step."""
        self.seen.append("step")
        return run(closure)


class Sharded(SingleStrategy):
    """Stands where an engine will, with the engine's own plugin."""

    name = "sharded"

    def label(self) -> DistributedType:
        """Return an engine's label."""
        return DistributedType.FSDP


class Sped(Sharded):
    """Another."""

    name = "sped"


@dataclass
class ShardedPlugin:
    """The engine's plugin, which a variable fills."""

    fsdp_version: int = field(default_factory=lambda: int(os.environ.get("FSDP_VERSION", "1")))


SHARDED = table.Engine(
    "fsdp",
    "FSDP",
    strategy=f"{__name__}:Sharded",
    plugin=f"{__name__}:ShardedPlugin",
    argument="fsdp_plugin",
    flag="ACCELERATE_USE_FSDP",
)


@dataclass
class SpedPlugin:
    """The plugin of the other."""

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Be the selected one of several, as a plugin of DeepSpeed is."""


SPED = table.Engine(
    "deepspeed",
    "DeepSpeed",
    strategy=f"{__name__}:Sped",
    plugin=f"{__name__}:SpedPlugin",
    argument="deepspeed_plugin",
    flag="ACCELERATE_USE_DEEPSPEED",
)


class Settings(KwargsHandler):
    """A third party's plugin."""


class Foreign(SingleStrategy):
    """A third party's strategy."""

    name = "foreign"
    plugin_type = Settings


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the rows of two engines a strategy, and forget what a test registers and sets."""
    rows = {"deepspeed": SPED, "fsdp": SHARDED} | {engine.name: engine for engine in table.BUILT_IN}
    monkeypatch.setattr(table, "engines", lambda: rows)
    monkeypatch.setattr(registry, "engines", lambda: rows)
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "load", _load_here(registry.load))
    for flag in FLAGS:
        monkeypatch.setenv(flag, "")


def _load_here(load: Any) -> Any:
    """Find the classes of this file, which pytest imports under no name that others could use."""
    return lambda home: globals()[home.partition(":")[2]] if home.startswith(f"{__name__}:") else load(home)


@pytest.mark.usefixtures("engines")
def test_a_plugin_reaches_its_strategy_and_the_users() -> None:
    """The strategy has it, the state shows it, the variable that libraries read is set, and makes it too."""
    plugin = ShardedPlugin()
    accelerator = Accelerator(fsdp_plugin=plugin)
    strategy = accelerator._runtime.strategy
    assert type(strategy) is Sharded
    assert strategy.parts.plugin is plugin
    assert accelerator.state.fsdp_plugin is plugin
    assert PartialState().distributed_type is accelerator.distributed_type is DistributedType.FSDP
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    AcceleratorState._reset_state(reset_partial_state=True)
    with patch_environment(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2"):
        accelerator = Accelerator()
    assert accelerator._runtime.strategy.parts.plugin is accelerator.state.fsdp_plugin
    assert accelerator.is_fsdp2


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("through", ["accelerator", "state"])
def test_a_second_accelerator_gets_the_engine_of_the_first(through: str) -> None:
    """Without a plugin of its own it trains as the state says, whoever made the state."""
    plugin = ShardedPlugin()
    if through == "accelerator":
        Accelerator(fsdp_plugin=plugin)
        os.environ["ACCELERATE_USE_FSDP"] = ""
    else:
        AcceleratorState(fsdp_plugin=plugin, _from_accelerator=True)
    second = Accelerator()
    assert type(second._runtime.strategy) is Sharded
    assert second._runtime.strategy.parts.plugin is plugin
    AcceleratorState._reset_state(reset_partial_state=True)
    assert type(Accelerator()._runtime.strategy) is SingleStrategy


@pytest.mark.parametrize(
    ("word", "near"),
    [("bfloat16", "bf16"), ("float16", "fp16"), ("fp32", "no"), (torch.bfloat16, "bf16"), ("bf61", "bf16")],
)
def test_a_precision_under_another_name_has_a_suggestion(word: Any, near: str, fresh_state: None) -> None:
    """Names of dtypes and slips of the keyboard lead to the word that is meant."""
    with pytest.raises(ConfigurationError, match=rf"Did you mean '{near}'\? Use one of \['no', "):
        Accelerator(cpu=True, mixed_precision=word)


@pytest.mark.usefixtures("engines")
def test_a_plugin_comes_before_the_engine_of_the_launcher(caplog: pytest.LogCaptureFixture) -> None:
    """The run trains with the engine whose plugin is in code, and a warning names both."""
    with patch_environment(ACCELERATE_USE_DEEPSPEED="true"):
        accelerator = Accelerator(fsdp_plugin=ShardedPlugin())
    assert type(accelerator._runtime.strategy) is Sharded
    (heard,) = [each.getMessage() for each in caplog.records]
    assert "got ShardedPlugin, and ACCELERATE_USE_DEEPSPEED=true. Leave one of them out." in heard


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("launched", [False, True])
def test_a_reset_forgets_the_engine_that_a_plugin_chose(launched: bool) -> None:
    """The variable that the run set for libraries chooses no later run; what a launcher set does, and stays."""
    os.environ["ACCELERATE_USE_FSDP"] = "1" if launched else ""
    Accelerator(fsdp_plugin=ShardedPlugin())
    assert os.environ["ACCELERATE_USE_FSDP"] == ("1" if launched else "true")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert os.environ.get("ACCELERATE_USE_FSDP") == ("1" if launched else None)
    assert type(Accelerator()._runtime.strategy) is (Sharded if launched else SingleStrategy)


@pytest.mark.usefixtures("engines")
def test_another_engine_is_refused() -> None:
    """One process trains with one engine; a new plugin of the same engine is used, and shown."""
    Accelerator(fsdp_plugin=ShardedPlugin())
    with pytest.raises(ConfigurationError, match=r"trains with the engine 'sharded'; 'sped' was"):
        Accelerator(deepspeed_plugin=SpedPlugin())
    other = ShardedPlugin()
    third = Accelerator(fsdp_plugin=other)
    assert third._runtime.strategy.parts.plugin is third.state.fsdp_plugin is other


@pytest.mark.usefixtures("engines")
def test_a_view_that_was_emptied_by_hand_decides_nothing() -> None:
    """The decision goes with the view of it, which holds nothing of its own that another engine would meet."""
    Accelerator(fsdp_plugin=ShardedPlugin())
    AcceleratorState._shared_state.clear()
    assert type(Accelerator(deepspeed_plugin=SpedPlugin())._runtime.strategy) is Sped


@pytest.mark.usefixtures("engines")
def test_third_parties_are_remembered_too() -> None:
    """A strategy that its own plugin chose is that of the second Accelerator as well."""
    register_strategy(Foreign)
    settings = Settings()
    first, second = Accelerator(kwargs_handlers=[settings]), Accelerator()
    assert type(first._runtime.strategy) is type(second._runtime.strategy) is Foreign
    assert second._runtime.strategy.parts.plugin is settings


def test_a_run_that_fails_late_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardware that does not compute in a format is found after the processes met; no view was written."""
    monkeypatch.setattr(CpuDevice, "supports_bf16", lambda self: False)
    with pytest.raises(DeviceUnavailableError, match="bf16"):
        Accelerator(mixed_precision="bf16", cpu=True)
    assert AcceleratorState._shared_state == {}
    assert Accelerator(cpu=True).mixed_precision == "no"


@pytest.mark.parametrize("rank", [0, 517, 1023])
def test_a_replica_of_many_ranks_among_1024(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds, loaders and schedules go by the part of the data, on torch's process group that moves no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Wide(SingleStrategy):
        name = "wide"

        @classmethod
        def lay_out(cls, rank: int, world_size: int, parallelism: Any, plugin: Any) -> Layout:
            return Layout.of(rank, world_size, {"dp_replicate": 4, "dp_shard": 32, "tp": 8})

    monkeypatch.setattr(registry, "_registered", {"wide": Wide})
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=1024)
    try:
        with patch_environment(ACCELERATE_STRATEGY="wide"):
            accelerator = Accelerator(cpu=True)
        part = rank // 8
        set_seed(5, device_specific=True)
        assert torch.initial_seed() == 5 + part
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(512)), batch_size=2))
        assert next(iter(loader))[0].tolist() == [2 * part, 2 * part + 1]
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step + 1.0)
        optimizer, schedule = accelerator.prepare(optimizer, schedule)
        optimizer.step()
        schedule.step()
        assert schedule.get_last_lr() == [129.0], "once for each of the 128 replicas"
    finally:
        dist.destroy_process_group()


def test_an_engines_extension_goes_inside_of_the_meter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ACCELERATE_RUNTIME names an engine that has one; with a meter there are two, and another name is refused."""
    row = table.Engine("own", "", extension=f"{__name__}:Noting")
    monkeypatch.setattr("accel_core.resolve.engines", lambda: {"own": row})
    with patch_environment(ACCELERATE_RUNTIME="own"):
        accelerator = Accelerator(cpu=True, kwargs_handlers=[MeterKwargs()])
    noting, meter = accelerator._runtime.extensions
    assert isinstance(noting, Noting)
    assert meter is accelerator.meter
    layer = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        layer, torch.optim.SGD(layer.parameters(), lr=1.0), torch.utils.data.DataLoader([torch.ones(1)])
    )
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
    assert noting.seen == ["model", "loader", "batch", "backward", "step"]
    with (
        patch_environment(ACCELERATE_RUNTIME="other"),
        pytest.raises(ConfigurationError, match=r"got ACCELERATE_RUNTIME=other, and installed are \['meter', 'own'\]"),
    ):
        Accelerator(cpu=True)
