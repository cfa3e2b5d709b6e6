"""The process groups over which parameters are sharded and copied."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel_core.mesh.layout import DATA_AXES
from accel_core.strategies.parts import Parts

__all__ = ["data_mesh"]


def data_mesh(parts: Parts) -> DeviceMesh:
    """Return the mesh of the axes along which ranks read different data: copies, if there are any, then shards.

    Without `ParallelismConfig` the mesh is laid out here.
    """
    laid_out = {axis: size for axis, size in parts.layout.sizes if axis in DATA_AXES}
    sizes = laid_out if parts.mesh is None else {axis: size for axis, size in laid_out.items() if size > 1}
    if parts.mesh is not None:
        return parts.mesh[tuple(sizes)]
    return init_device_mesh(parts.world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
