"""Which rank does what on a mesh: plain arithmetic, known before any process group exists.

Ranks are numbered row by row over the axes, the last one fastest, as `torch.distributed.init_device_mesh` does it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from accel_core._records import record
from accel_core.errors import ConfigurationError

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "sp", "tp")
"""All axes, outermost first: neighbors on the last ones talk most, and are nearest to each other."""

DATA_AXES = ("dp_replicate", "dp_shard", "ep")
"""Axes along which ranks read different data; those along "ep" hold different experts besides."""

SHARD_AXES = ("dp_shard", "ep", "cp")
"""Axes along which parameters are sharded; experts lie along "ep" alone."""

GROUPS = {"dp": DATA_AXES, "dp_shard_cp": SHARD_AXES, "dp_cp": (*DATA_AXES, "cp")}
"""Names of the groups that run over several axes, and those axes."""


@record(frozen=True)
class Layout:
    """How the ranks of a run share out data, parameters and the model's own parts.

    Attributes:
        rank: This process.
        sizes: For each axis, outermost first, its name and how many ranks lie along it.
    """

    rank: int
    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, rank: int, world_size: int, sizes: Mapping[str, int] | None = None) -> Layout:
        """Lay out a run.

        Raises:
            ConfigurationError: The sizes do not multiply to the number of processes, or an axis is unknown.
        """
        sizes = {"dp_replicate": world_size} if sizes is None else sizes
        unknown = sorted(set(sizes) - set(MESH_AXES))
        if unknown or math.prod(sizes.values()) != world_size:
            raise ConfigurationError(
                f"A mesh has the axes {', '.join(MESH_AXES)}, whose sizes multiply to the number of processes; got "
                f"{dict(sizes)} for {world_size} processes. Change a size, or the number of processes."
            )
        return cls(rank, tuple((axis, sizes[axis]) for axis in MESH_AXES if axis in sizes))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.sizes)

    def size(self, *axes: str) -> int:
        """Return how many ranks lie along some axes together; 1 for axes that the mesh does not have."""
        return math.prod(size for axis, size in self.sizes if axis in axes)

    def place(self, axes: tuple[str, ...], rank: int | None = None) -> int:
        """Return the number of a rank among those that differ from it along `axes` alone."""
        left, found, step = self.rank if rank is None else rank, 0, 1
        for axis, size in reversed(self.sizes):
            left, coordinate = divmod(left, size)
            if axis in axes:
                found, step = found + step * coordinate, step * size
        return found

    def group(self, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from this one along `axes` alone, in their order."""
        others = tuple(axis for axis, _ in self.sizes if axis not in axes)
        own = self.place(others)
        return tuple(rank for rank in range(self.world_size) if self.place(others, rank) == own)

    @property
    def parts(self) -> tuple[int, ...]:
        """For each rank of the world, which part of the data it reads; ranks of one replica read the same part."""
        return tuple(self.place(DATA_AXES, rank) for rank in range(self.world_size))

    @property
    def part(self) -> int:
        """Which part of the data this rank reads."""
        return self.place(DATA_AXES)

    @property
    def loss_part(self) -> int:
        """Which part of the loss this rank computes: that of its data, and of its tokens where sequences are shared."""
        return self.place(GROUPS["dp_cp"])

    @property
    def replicas(self) -> int:
        """Into how many parts the data is split."""
        return self.size(*DATA_AXES)

    @property
    def readers(self) -> tuple[int, ...]:
        """For each part of the data, the first rank that reads it: those whose metrics count."""
        first: dict[int, int] = {}
        for rank, part in enumerate(self.parts):
            first.setdefault(part, rank)
        return tuple(first[part] for part in range(self.replicas))
