"""FSDP, and the axes along which ranks share a model, as every part of accel knows them; imports nothing of them."""

from dataclasses import replace
from typing import Any

from accel_core.options.engines import BUILT_IN, Engine

FSDP = Engine(
    "fsdp",
    "FSDP",
    strategy="accel_parallel.row:strategy_path",
    plugin="accel_parallel.plugin:FullyShardedDataParallelPlugin",
    argument="fsdp_plugin",
    flag="ACCELERATE_USE_FSDP",
    containers=("torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel",),
    label="FSDP",
    switch="use_fsdp",
    takes_axes=True,
    options="accel_parallel.options:FsdpOptions",
    questions="accel_parallel.questions:questions",
)
FIRST = Engine("fsdp1", "FSDP 1", "torch")
SECOND = Engine("fsdp2", "FSDP 2", "torch", "2.6")
MESH = Engine(
    "mesh",
    "axes of a mesh",
    strategy="accel_parallel.row:mesh_path",
    plugin="accel_core.plugins.parallelism:TorchTensorParallelPlugin",
    argument="torch_tp_plugin",
    claims="accel_core.strategies.registry:needs_mesh",
    takes="accel_parallel.presharded_models:take",
)
CONTEXT = Engine("cp", "context parallel", "torch")
TENSOR = Engine("tp", "tensor parallel", "torch")
XLA = replace(
    next(engine for engine in BUILT_IN if engine.name == "xla"), strategy="accel_parallel.xla.strategy:XlaStrategy"
)
"""What accel-core knows of XLA devices, with the strategy."""


def mesh_path(plugin: Any, axes: Any) -> str:
    """Return where the strategy of a mesh is; no run without a pipeline imports that of one."""
    if axes is not None and axes.pp_enabled:
        return "accel_parallel.pipeline.strategy:PipelineStrategy"
    return "accel_parallel.mesh.strategy:MeshStrategy"


def strategy_path(plugin: Any, axes: Any) -> str:
    """Return where the strategy of the requested version is."""
    if plugin.fsdp_version == 2:
        if axes is not None and axes.pp_enabled:
            return "accel_parallel.pipeline.sharded:ShardedPipelineStrategy"
        return "accel_parallel.fsdp2.strategy:FullyShardStrategy"
    return "accel_parallel.fsdp1.strategy:FullyShardedWrapperStrategy"
