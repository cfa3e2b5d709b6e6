"""Which part of the data a rank of a device mesh reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["data_place", "mesh_parts"]

_DATA_AXES = ("dp", "dp_replicate", "dp_shard", "fsdp")


def data_place(mesh: DeviceMesh) -> tuple[int, int]:
    """Return the number of parts that the data has on a mesh, and the part of this rank.

    Args:
        mesh: A `torch.distributed.DeviceMesh` with named axes. Ranks along `dp`, `dp_replicate`, `dp_shard` and `fsdp`
            share the data; ranks along the others get the same.
    """
    parts, part = 1, 0
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name in _DATA_AXES:
            parts, part = parts * mesh.size(axis), part * mesh.size(axis) + mesh.get_local_rank(axis)
    return parts, part


def mesh_parts(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return, for each rank of a mesh, which part of the data it reads.

    Args:
        mesh: A `torch.distributed.DeviceMesh` with named axes, over all ranks.
    """
    ranks = mesh.mesh
    found: dict[int, int] = {}
    for place in range(ranks.numel()):
        part, left = 0, place
        coordinates: list[int] = []
        for size in reversed(ranks.shape):
            left, coordinate = divmod(left, size)
            coordinates.insert(0, coordinate)
        for axis, name in enumerate(mesh.mesh_dim_names or ()):
            if name in _DATA_AXES:
                part = part * ranks.shape[axis] + coordinates[axis]
        found[int(ranks.flatten()[place])] = part
    return tuple(found[rank] for rank in sorted(found))
