"""Which strategy of this package a run gets: by plugin, by variable, by the axes."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from accel_core.accelerator import Accelerator
from accel_core.errors import ConfigurationError, EngineUnavailableError, UnsupportedTypeError
from accel_core.host.environ import patch_environment
from accel_core.modules import unwrap
from accel_core.options.engines import engines, load
from accel_core.plugins.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from accel_core.strategies.ddp import DataParallelStrategy
from accel_core.strategies.registry import Request, choose
from accel_parallel.fsdp1.strategy import FullyShardedWrapperStrategy
from accel_parallel.fsdp2.strategy import FullyShardStrategy
from accel_parallel.mesh.strategy import MeshStrategy
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_parallel.row import mesh_path, strategy_path
from accel_testing import requires


@pytest.mark.usefixtures("fresh_state")
def test_a_plugin_that_is_none_is_refused() -> None:
    """`fsdp_plugin=True`, which trained without FSDP, is answered with the class that is meant."""
    with pytest.raises(UnsupportedTypeError, match=r"got True \(bool\)\. Write fsdp_plugin=FullyShardedDataParallelPl"):
        Accelerator(cpu=True, fsdp_plugin=True)  # type: ignore[arg-type]


def test_the_version_chooses_the_way_to_shard() -> None:
    """A version of FSDP is asked for by its plugin, or by the variables of a launcher."""
    assert choose(Request(2, (FullyShardedDataParallelPlugin(),))).strategy is FullyShardedWrapperStrategy
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    choice = choose(Request(2, (plugin,)))
    assert (choice.strategy, choice.plugins, choice.argument) == (FullyShardStrategy, (plugin,), "fsdp_plugin")
    with patch_environment(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2"):
        choice = choose(Request(1))
    assert (choice.strategy, choice.plugins[0].fsdp_version) == (FullyShardStrategy, 2)


def test_mesh_is_asked_for_by_its_axes() -> None:
    """An axis along which ranks share a replica asks for a mesh, as its plugin does; copies alone are data parallel."""
    choice = choose(Request(2, parallelism=ParallelismConfig(cp_size=2)))
    assert (choice.strategy, choice.plugins) == (MeshStrategy, ())
    plugin = TorchTensorParallelPlugin(2)
    assert choose(Request(2, (plugin,))).plugins == (plugin,)
    assert choose(Request(2, parallelism=ParallelismConfig(dp_replicate_size=2))).strategy is DataParallelStrategy


@requires("engine:deepspeed")  # a variable of an engine that is not there is refused
def test_a_plugin_is_stronger_than_a_variable() -> None:
    """Argument before environment: the plugin's engine is the one that is named."""
    with patch_environment(ACCELERATE_USE_DEEPSPEED="true"):
        assert choose(Request(2, (FullyShardedDataParallelPlugin(),))).argument == engines()["fsdp"].argument


@requires("engine:deepspeed")
def test_two_engines_are_refused() -> None:
    """Plugins of two engines contradict each other."""
    from accel_deepspeed.plugin import DeepSpeedPlugin

    with pytest.raises(ConfigurationError, match=r"got plugins of deepspeed and fsdp\. Keep one"):
        choose(Request(2, (FullyShardedDataParallelPlugin(), DeepSpeedPlugin())))


def test_engines_not_built_are_unwrapped_all_the_same() -> None:
    """A model that a user wrapped by FSDP comes out of its wrapper."""
    wrapper: Any = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    torch.nn.Module.__init__(wrapper)
    inner = torch.nn.Linear(1, 1)
    wrapper._fsdp_wrapped_module = inner
    assert unwrap.extract_model_from_parallel(wrapper) is inner


@pytest.mark.parametrize("axis", ["tp", "cp", "ep"])
def test_pipelines_are_combined_with_copies_and_shards_alone(axis: str) -> None:
    """Another axis besides is refused by name."""
    axes = ParallelismConfig(pp_size=2, **{f"{axis}_size": 2})
    for plugin in (None, FullyShardedDataParallelPlugin(fsdp_version=2)):
        path = mesh_path(None, axes) if plugin is None else strategy_path(plugin, axes)
        with pytest.raises(EngineUnavailableError, match=rf"\['{axis}'\]"):
            load(path).lay_out(0, 4, axes, plugin)
