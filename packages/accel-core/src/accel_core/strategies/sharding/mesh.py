"""The process groups over which parameters are sharded and copied."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel_core.errors import EngineUnavailableError, StateError
from accel_core.mesh.layout import DATA_AXES
from accel_core.strategies.parts import Parts

__all__ = ["data_mesh", "data_part"]


def data_mesh(parts: Parts) -> DeviceMesh:
    """Return the mesh of the axes along which ranks read different data: copies, if there are any, then shards.

    Without `ParallelismConfig` the mesh is laid out here.
    """
    laid_out = {axis: size for axis, size in parts.layout.sizes if axis in DATA_AXES}
    sizes = laid_out if parts.mesh is None else {axis: size for axis, size in laid_out.items() if size > 1}
    if parts.mesh is not None:
        return parts.mesh[tuple(sizes)]
    return init_device_mesh(parts.world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def data_part(mesh: DeviceMesh | None, device: torch.device) -> DeviceMesh:
    """Return the part of a mesh over which parameters are sharded and copied; one of all ranks where there is none.

    Args:
        mesh: The mesh of a run. One whose axes have no names is for sharding alone.
        device: Where the ranks compute.

    Raises:
        EngineUnavailableError: It has an axis along which ranks read the same data.
        StateError: There is no mesh and no process group.
    """
    if mesh is None:
        if not dist.is_initialized():
            raise StateError(
                "FSDP shards over the ranks of a process group; got none. Make an Accelerator with an FSDP plugin."
            )
        return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    names = mesh.mesh_dim_names or ()
    others = [name for name in names if name not in DATA_AXES and mesh[name].size() > 1]
    if others:
        raise EngineUnavailableError(
            f"FSDP is not combined with tensor, context or sequence parallel yet; got the axes {others}. "
            "Use dp_replicate_size and dp_shard_size alone."
        )
    axes = tuple(name for name in names if name in DATA_AXES)
    return mesh[axes] if axes else mesh
