"""FSDP as every part of accel knows it; imports nothing of it."""

from typing import Any

from accel_core.options.engines import Engine

__all__ = ["ENGINE", "FIRST", "SECOND", "home"]

ENGINE = Engine(
    "fsdp",
    "FSDP",
    strategy="accel_core.strategies.sharding.row:home",
    plugin="accel_core.plugins.fsdp:FullyShardedDataParallelPlugin",
    argument="fsdp_plugin",
    flag="ACCELERATE_USE_FSDP",
    containers=("torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel",),
    label="FSDP",
    switch="use_fsdp",
    takes_axes=True,
    options="accel_core.options.fsdp:FsdpOptions",
    questions="accel_launch.questions.sharding:questions",
)
FIRST = Engine("fsdp1", "FSDP 1", "torch")
SECOND = Engine("fsdp2", "FSDP 2", "torch", "2.6")


def home(plugin: Any) -> str:
    """Return where the strategy of the requested version is."""
    if plugin.fsdp_version == 2:
        return "accel_core.strategies.fsdp2.strategy:FullyShardStrategy"
    return "accel_core.strategies.fsdp1.strategy:FullyShardedWrapperStrategy"
