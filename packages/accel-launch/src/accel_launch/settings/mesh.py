"""The axes of the processes of a run, computed from the settings."""

import math
from dataclasses import dataclass

from accel_core.mesh.layout import DATA_AXES, MESH_AXES
from accel_core.options.engines import load
from accel_launch.settings.child import active, switched
from accel_launch.settings.resolve import Settings

_DATA_AXES = ("dp", *DATA_AXES)


@dataclass(frozen=True)
class Mesh:
    """Axes of the processes of a run."""

    sizes: dict[str, int]  # the outermost axis first: along the last, ranks are neighbors
    processes: int

    @property
    def fits(self) -> bool:
        """Return whether the sizes of the axes multiply to the number of processes."""
        return math.prod(self.sizes.values()) == self.processes

    @property
    def data_parallel(self) -> int:
        """Return the number of processes that read different data."""
        return math.prod(size for axis, size in self.sizes.items() if axis in _DATA_AXES)

    def groups(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks along an axis."""
        if not self.fits:
            return []
        names = list(self.sizes)
        stride = math.prod(self.sizes[name] for name in names[names.index(axis) + 1 :])
        size = self.sizes[axis]
        first = [rank for rank in range(self.processes) if rank // stride % size == 0]
        return [[rank + stride * place for place in range(size)] for rank in first]


def mesh_of(settings: Settings) -> Mesh:
    """Return the axes that the settings give the processes."""
    processes = settings.layout.processes
    for engine in switched(settings):
        if engine.mesh:
            return Mesh(load(engine.mesh)(settings, processes), processes)
    sizes = {axis: int(settings[f"parallelism_config_{axis}_size"]) for axis in MESH_AXES}
    if not active("parallelism", settings) or math.prod(sizes.values()) == 1:
        return Mesh({"dp": processes}, processes)
    return Mesh(sizes, processes)
