# What type checkers see of DeepSpeed's plugin: at runtime it is found by its engine's row, here by its package's name.
from typing import Any

from accel_deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin

def __getattr__(name: str) -> Any: ...
