"""What a prepared loader was asked to do, fixed when it is prepared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from accel_core._records import record
from accel_core.comm.batch import slice_tensors
from accel_core.mesh.layout import DATA_AXES, Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DATA_AXES = ("dp", *DATA_AXES, "fsdp")


@record(frozen=True)
class LoaderSettings:
    """How a loader shares out its data and where batches go."""

    device: torch.device | None = None  # where batches go; `None` leaves them where they are
    # Random number generators that all ranks take over from rank 0 when an iteration begins.
    rng_types: list[Any] | None = None
    synchronized_generator: torch.Generator | None = None  # the generator meant by "generator" in `rng_types`
    skip_batches: int = 0  # batches left out at the start of every iteration
    drop_last: bool = False  # whether the last, incomplete batch is left out
    non_blocking: bool = False  # copy to the device without waiting
    torch_device_mesh: DeviceMesh | None = None  # the mesh of all ranks, where data parallelism is one of several axes
    split_batches: bool = False  # a dispatcher cuts each batch in one part a rank
    slice_fn: Callable[..., Any] = slice_tensors  # takes a rank's part out of a global batch that is dispatched
    uneven_end: str = "drop"  # what happens when streams of the ranks differ in length: "drop", "repeat" or "empty"
    local_ranks: int = 0  # number of parts where each rank's loader gives the rank's own already, 0 otherwise
    # For each rank of the world, which part of the data it reads; `None` where each reads its own.
    parts: tuple[int, ...] | None = None
    cut: bool = False  # whether ranks that read the same hold a part of each sample


def setting(name: str) -> Any:
    """Return an attribute that is kept in a loader's settings; old code sets some after the loader was prepared."""

    def change(loader: Any, value: object) -> None:
        loader.settings = dataclasses.replace(loader.settings, **{name: value})

    return property(lambda loader: getattr(loader.settings, name), change)


def mesh_parts(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return, for each rank of a mesh, which part of the data it reads."""
    layout = Layout(0, tuple(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False)))
    places = mesh.mesh.flatten().argsort().tolist()  # of each rank, as the mesh may hold them in any order
    return tuple(layout.place(_DATA_AXES, place) for place in places)
