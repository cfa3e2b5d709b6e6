"""The loggers of accel as children of those that wrote the same records in Accelerate."""

from __future__ import annotations

import logging

from accel_core.options.engines import PUBLIC

_WRITERS = {
    **{known.module: "accelerate" for known in PUBLIC},  # engines of others too
    "accel": "accelerate",
    "accel_bigmodel": "accelerate.utils.modeling",
    "accel_bigmodel.dispatch": "accelerate.big_modeling",
    "accel_core": "accelerate",
    "accel_core.checkpoint": "accelerate.checkpointing",
    "accel_core.data": "accelerate.data_loader",
    "accel_core.host": "accelerate.utils.environment",
    "accel_core.optim.scheduler": "accelerate.scheduler",
    "accel_core.plugins": "accelerate.utils.dataclasses",
    "accel_core.runtime": "accelerate.accelerator",
    "accel_core.tracking": "accelerate.tracking",
    "accel_launch": "accelerate.commands",
    "accel_parallel.checkpoint": "accelerate.checkpointing",
    "accel_parallel.plugin": "accelerate.utils.dataclasses",
    "accel_quant": "accelerate.utils.bnb",
    "accel_torchft": "accelerate",
    "accel_trackers": "accelerate.tracking",
}
"""Logger of accel, and the one of Accelerate that it answers to."""


def govern_records() -> None:
    """Let levels and handlers of the loggers `accelerate` and below hold for what accel writes."""
    for ours, theirs in _WRITERS.items():
        logger = logging.getLogger(ours)
        logger.parent = logging.getLogger(theirs)  # names differ, so logging would not find it
        logger.setLevel(logger.level)  # makes logging forget which levels it found enabled before
