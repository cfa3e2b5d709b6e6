"""The Megatron run of this process. There is only one, because megatron-core's groups belong to the process."""

from __future__ import annotations

from argparse import Namespace

import torch

from accel_core._records import record
from accel_core.errors import StateError
from accel_core.mesh.layout import Layout
from accel_core.process.world import World
from accel_megatron.plugin import MegatronLMPlugin


@record
class MegatronRun:
    """A Megatron training run."""

    plugin: MegatronLMPlugin  # the user's configuration
    world: World  # the processes
    layout: Layout  # the layout of the ranks
    arguments: Namespace  # the arguments of Megatron-LM; empty until `initialize`
    optimizer: object = None  # the optimizer that the user passed, or `None`
    schedule: object = None  # the schedule that the user passed, or `None`

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.world.device


_now: list[MegatronRun] = []


def start(run: MegatronRun) -> None:
    """Make a run the current one of the process, replacing an earlier one."""
    _now[:] = [run]


def current() -> MegatronRun:
    """Return the current run of the process, which must have been started."""
    if not _now:
        raise StateError(
            "Megatron needs an Accelerator with a MegatronLMPlugin; got none in this process. Create one: "
            "Accelerator(megatron_lm_plugin=MegatronLMPlugin())."
        )
    return _now[0]
