"""Models that ranks share: FSDP, tensor and context parallel, meshes of them, and checkpoints in shards.

Importing this package loads nothing; a name brings its module, and torch, when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_core._lazy import attach
from accel_parallel._version import __version__

if TYPE_CHECKING:
    from accel_core.data.labels import shift_labels as shift_labels
    from accel_parallel import fsdp_files as fsdp_files
    from accel_parallel.pipeline.kwargs import PipelineKwargs as PipelineKwargs
    from accel_parallel.plugin import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from accel_parallel.plugin import disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading
    from accel_parallel.plugin import enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading

_NAMES = {
    "accel_core.data.labels": ["shift_labels"],
    "accel_parallel.pipeline.kwargs": ["PipelineKwargs"],
    "accel_parallel.plugin": [
        "FullyShardedDataParallelPlugin",
        "disable_fsdp_ram_efficient_loading",
        "enable_fsdp_ram_efficient_loading",
    ],
}

_name, __dir__, _all = attach(__name__, {name: home for home, names in _NAMES.items() for name in names})
_module = attach(__name__, {"fsdp_files": __name__})[0]
__all__ = [*_all, "__version__"]


def __getattr__(name: str) -> object:
    return _module(name) if name == "fsdp_files" else _name(name)
