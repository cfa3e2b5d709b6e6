"""What the process trains with Megatron: its groups are those of the process, so there is one of everything."""

from __future__ import annotations

from argparse import Namespace

import torch

from accel_core._records import record
from accel_core.errors import StateError
from accel_core.mesh.layout import Layout
from accel_core.plugins.megatron import MegatronLMPlugin
from accel_core.process.world import World

__all__ = ["Run", "current", "start"]


@record
class Run:
    """A run that trains with Megatron.

    Attributes:
        plugin: What the user configured.
        world: The processes.
        layout: Which rank does what.
        arguments: The arguments of Megatron-LM by their names there; empty until `initialize`.
        optimizer: What the optimizer is made like, or `None`.
        schedule: What the schedule is made like, or `None`.
    """

    plugin: MegatronLMPlugin
    world: World
    layout: Layout
    arguments: Namespace
    optimizer: object = None
    schedule: object = None

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.world.device


_now: list[Run] = []


def start(run: Run) -> None:
    """Make a run that of the process, in place of an earlier one."""
    _now[:] = [run]


def current() -> Run:
    """Return the run of the process.

    Raises:
        StateError: None was started.
    """
    if not _now:
        raise StateError(
            "Megatron trains what an Accelerator prepares; got no Accelerator with a MegatronLMPlugin in this process. "
            "Make one: Accelerator(megatron_lm_plugin=MegatronLMPlugin())."
        )
    return _now[0]
