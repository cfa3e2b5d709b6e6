"""Recording where the time goes: one Chrome trace a rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from accel_core.plugins.handlers import ProfileKwargs

PROFILE_PATTERN_NAME = "profile_{suffix}.json"


@contextmanager
def profile(handler: ProfileKwargs, rank: int) -> Iterator[torch.profiler.profile]:
    """Profile the block."""
    folder = handler.output_trace_dir
    if folder is not None:
        os.makedirs(folder, exist_ok=True)  # one that cannot be made is known before the block runs
    with handler.build() as profiler:
        yield profiler
    if folder is not None:
        profiler.export_chrome_trace(str(Path(folder) / PROFILE_PATTERN_NAME.format(suffix=rank)))
