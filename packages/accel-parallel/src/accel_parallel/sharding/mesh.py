"""The process groups over which parameters are sharded and copied."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel_core.errors import StateError
from accel_core.mesh.layout import DATA_AXES, SHARD_AXES
from accel_core.strategies.parts import Parts

_FLATTENED = "dp_shard_cp"


def data_mesh(parts: Parts) -> DeviceMesh:
    """Return the mesh of the axes along which parameters are copied, if there are any, and then of those for shards."""
    # Shards lie along "cp" too: its ranks see parts of one sequence, so their gradients add up as of other samples.
    if parts.mesh is not None:
        return sharding_part(parts.mesh)
    sizes = {axis: size for axis, size in parts.layout.sizes if axis in DATA_AXES}
    return init_device_mesh(parts.world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def data_part(mesh: DeviceMesh | None, device: torch.device) -> DeviceMesh:
    """Return the part of a mesh over which parameters are sharded and copied; one of all ranks where there is none.

    Raises:
        StateError: There is no mesh and no process group.
    """
    if mesh is None:
        if not dist.is_initialized():
            raise StateError(
                "FSDP shards over the ranks of a process group; got none. Make an Accelerator with an FSDP plugin."
            )
        return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    return sharding_part(mesh) if mesh.mesh_dim_names else mesh


def sharding_part(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of a mesh whose axes are for copies and shards; those for shards flattened where they are two."""
    names = mesh.mesh_dim_names or ()
    shards = tuple(name for name in names if name in SHARD_AXES)
    copies = tuple(name for name in names if name in DATA_AXES and name not in SHARD_AXES)
    if len(shards) < 2:
        axes = (*copies, *shards)
        return mesh[axes] if axes else mesh
    flattened: DeviceMesh = mesh[shards]._flatten(_FLATTENED)
    if not copies:
        return flattened
    with warnings.catch_warnings():
        # There is no other way yet to a mesh of which one axis is flattened.
        warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)
        both = (*copies, _FLATTENED)
        return mesh[both]
