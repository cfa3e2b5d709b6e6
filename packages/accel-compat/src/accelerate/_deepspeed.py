"""What DeepSpeed adds to Accelerate's surface."""

from __future__ import annotations

from typing import Any

from torch import nn

from accel_core.modules.compilation import compile_regions_in_place


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile the repeated blocks of a model that DeepSpeed will shard, and the modules outside them, in place."""
    compile_regions_in_place(module, **compile_kwargs)
