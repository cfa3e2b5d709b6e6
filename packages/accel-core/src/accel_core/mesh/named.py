"""The device mesh of a run: torch's own, with an error that names the axes which are active."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel_core.errors import MeshAxisError
from accel_core.host.versions import is_torch_version
from accel_core.mesh.layout import GROUPS, MESH_AXES

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["lay_out"]


def lay_out(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """Lay the ranks of the run out along axes; every rank calls it."""
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    # The compiler of earlier versions knows a mesh by its very class, and compiles no split model with another one.
    if is_torch_version(">=", "2.13"):
        mesh.__class__ = _RunMesh
    return mesh


class _RunMesh(DeviceMesh):
    """A mesh whose errors name axes; copies, and what pickles hold, are plain meshes of torch."""

    # Pickles of sharded tensors hold their mesh, and have to be read without accel. A pickler takes the class from here
    # and refuses to write an object as one of another class.
    __class__ = property(lambda mesh: DeviceMesh)

    def __reduce_ex__(self, protocol: int) -> str | tuple[object, ...]:  # type: ignore[override]
        plain = object.__new__(DeviceMesh)
        plain.__dict__.update(self.__dict__)
        return plain.__reduce_ex__(protocol)

    # torch's methods are called by the name of their class: torch.compile follows that, and fails at `super()`.
    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        try:
            return DeviceMesh.__getitem__(self, mesh_dim_names)
        except KeyError as error:
            _refuse(self, mesh_dim_names, error)

    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        try:
            return DeviceMesh.get_group(self, mesh_dim)
        except KeyError as error:
            _refuse(self, mesh_dim, error)


def _refuse(mesh: DeviceMesh, asked: object, error: KeyError) -> NoReturn:
    """Raise an error that names the axes which are not active, or else torch's own."""
    names = mesh.mesh_dim_names or ()
    known = [*names, *(group for group, axes in GROUPS.items() if set(axes) & set(names))]
    wanted = asked if isinstance(asked, (tuple, list)) else (asked,)
    missing = [name for name in wanted if name not in known]
    if not missing:
        raise error
    active = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    raise MeshAxisError(
        f"The mesh has no such axis; got {', '.join(map(repr, missing))}, and active are {active}. "
        f"{_remedy(missing[0], known)}"
    ) from None


def _remedy(name: object, known: list[str]) -> str:
    """Return what to do about a name that is neither an active axis nor one of their groups."""
    axes = GROUPS.get(str(name), (str(name),))
    if not set(axes) <= set(MESH_AXES):
        return f"Use one of {', '.join(known)}."
    first = f"Set {' or '.join(f'{axis}_size' for axis in axes)} of ParallelismConfig to 2 or more"
    return f"{first}." if name in GROUPS else f"{first}, or check first that {name!r} is in mesh.mesh_dim_names."
