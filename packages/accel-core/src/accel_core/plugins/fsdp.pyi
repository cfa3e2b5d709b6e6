# What type checkers see of FSDP's plugin: at runtime it is found by its engine's row, here by its package's name.
from typing import Any

from accel_parallel.plugin import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin

def __getattr__(name: str) -> Any: ...
