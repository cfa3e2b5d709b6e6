"""`PartialState`: the process as users see it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from accel_core.devices import registry
from accel_core.host import environ
from accel_core.options.enums import DistributedType
from accel_core.process import world
from accel_core.state.process_control import FunctionControl, ProcessControl, SharedState


def do_nothing(*args: object, **kwargs: object) -> None:
    """Accept anything and return nothing."""


class PartialState(SharedState, FunctionControl):
    """The process among its fellows, and control over who does what.

    Every instance shares one state. The first one sets the process up: it finds the device and the rank and, with
    several processes, joins the process group, so all ranks have to make one.

    Args:
        cpu: Compute on the CPU whatever hardware is here.
        **kwargs: Passed to `torch.distributed.init_process_group`, for example `backend` or `timeout`.

    Attributes:
        device (torch.device): The device of this process.
        distributed_type (DistributedType): How the run is spread, as a label.
        num_processes (int): Number of processes.
        process_index (int): Number of this process, from 0.
        local_process_index (int): Number of this process on its machine.
        backend (str | None): The process group's backend.
        debug (bool): Whether collectives are checked across ranks.
        fork_launched (bool): Whether a notebook launcher forked this process.

    Raises:
        ConfigurationError: The environment or the arguments contradict each other.

    Examples:
        >>> state = PartialState()
        >>> state.is_main_process
        True
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _known_attributes: ClassVar[tuple[str, ...]] = (
        "_cpu",
        "_shared_state",
        "backend",
        "debug",
        "device",
        "distributed_type",
        "fork_launched",
        "local_process_index",
        "num_processes",
        "process_index",
    )

    device: torch.device
    distributed_type: DistributedType
    num_processes: int
    process_index: int
    local_process_index: int
    backend: str | None
    debug: bool
    fork_launched: bool

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if self.initialized:
            return
        kwargs.pop("_use_sagemaker_dp", None)
        found = world.ensure(cpu, **kwargs)
        self.__dict__.update(
            _cpu=cpu or environ.flag("ACCELERATE_USE_CPU"),
            backend=found.backend,
            debug=found.debug,
            device=found.device,
            distributed_type=found.base_label,
            fork_launched=found.fork_launched,
            local_process_index=found.local_rank,
            num_processes=found.size,
            process_index=found.rank,
        )

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}{f'  Backend: {self.backend}' if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    @staticmethod
    def _reset_state() -> None:
        """Empty the shared state. The process group stays; the next PartialState finds it again."""
        PartialState._shared_state.clear()
        ProcessControl._mains = None
        world.forget()

    def _find_world(self) -> world.World:
        _ = self.distributed_type  # a state that was reset says so, and finds no other world
        return world.ensure()

    @property
    def default_device(self) -> torch.device:
        """The device that a process without any setting would use here."""
        return registry.choose().default_device()

    def set_device(self) -> None:
        """Make this process's device current; it is chosen and made current when the state is set up."""
        self.device = registry.named(self.device.type).place(self.local_process_index)

    def destroy_process_group(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        """Leave the process group (`None`: the default one); without one, do nothing.

        Args:
            group: The group to leave.
        """
        if self.fork_launched and group is None:
            return
        world.destroy(group)


def wait_for_everyone() -> None:
    """Stop until every process has come here; with one process, return at once.

    Examples:
        >>> if accelerator.is_main_process:
        ...     torch.save(model.state_dict(), "first.pt")
        >>> wait_for_everyone()
        >>> weights = torch.load("first.pt")  # every process finds the file
    """
    PartialState().wait_for_everyone()
