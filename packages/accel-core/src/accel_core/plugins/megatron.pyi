# What type checkers see of Megatron's plugin: at runtime it is found by its engine's row, here by its package's name.
from typing import Any

from accel_megatron.plugin import MegatronLMPlugin as MegatronLMPlugin

def __getattr__(name: str) -> Any: ...
