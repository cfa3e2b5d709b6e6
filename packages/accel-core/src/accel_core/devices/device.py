"""What accel needs to know about one kind of hardware."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from accel_core.errors import DeviceUnavailableError
from accel_core.host import environ
from accel_core.options.enums import DistributedType
from accel_core.options.hardware import Hardware


def module_of(kind: str) -> Any:
    """Return the module of torch that drives a kind of device, or `None`."""
    return getattr(torch, kind, None)


class Device:
    """One kind of hardware.

    Called in this order: `is_available` while a kind is chosen, `place` once when the process is set up,
    `backend` when its process group is joined, the rest whenever they are needed. As it stands, the class serves every
    kind that torch drives through a module `torch.<name>` (cuda, xpu, npu, …); another kind overrides what differs. A
    third party's class sets `name`, `backend` and `label`, and is made without arguments.
    """

    name: str
    """The device type of torch, such as `cuda`."""
    backend: str
    """The process-group backend that moves this device's tensors between processes."""
    label: DistributedType
    """What users see as `distributed_type` when several processes use this device."""
    supports_fp16: bool = True
    has_scaler: bool = True
    """Whether fp16 training needs, and has, a gradient scaler here."""

    def __init__(self, hardware: Hardware | None = None) -> None:
        if hardware is not None:
            self.name, self.backend, self.label = hardware.name, hardware.backend, hardware.label

    @property
    def module(self) -> ModuleType:
        """The module of torch that drives this device.

        Raises:
            DeviceUnavailableError: The installed torch has no such module.
        """
        module = module_of(self.name)
        if not isinstance(module, ModuleType):
            raise DeviceUnavailableError(
                f"A device has to be one that torch drives; got {self.name!r} and torch {torch.__version__}. "
                f"Install the torch extension for {self.name}, or choose another device."
            )
        return module

    def is_available(self) -> bool:
        """Return whether torch was built for this device, or an extension taught it, and it sees one."""
        module = module_of(self.name)
        with environ.patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):  # else forks could not use CUDA any more
            return module is not None and bool(module.is_available())

    def count(self) -> int:
        """Return how many devices of this kind the process sees."""
        return int(self.module.device_count())

    def place(self, local_rank: int) -> torch.device:
        """Make a device current for this process and return it."""
        device = torch.device(self.name, local_rank % max(self.count(), 1))  # more ranks than devices share them
        self.module.set_device(device)
        return device

    def default_device(self) -> torch.device:
        """Return the device of a process that was given none in particular."""
        return torch.device(self.name)

    def group_arguments(self) -> dict[str, Any]:
        """Return what `torch.distributed.init_process_group` is told for this device; a user's own arguments win."""
        return {}

    def supports_bf16(self) -> bool:
        """Return whether the hardware computes in bfloat16."""
        probe = getattr(self.module, "is_bf16_supported", None)
        return bool(probe()) if probe is not None else True

    def configure_bf16(self) -> None:
        """Configure the runtime for bfloat16 before its first use; only XLA needs it, by environment variables."""
        return

    def synchronize(self) -> None:
        """Wait until all work given to the device is done."""
        self.module.synchronize()

    def empty_cache(self) -> None:
        """Give memory that is cached but unused back to the device."""
        self.module.empty_cache()

    def rng_state(self) -> torch.Tensor | None:
        """Return the state of this device's random number generator, `uint8` on the CPU."""
        state: torch.Tensor = self.module.get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Put back a state that `rng_state` returned."""
        self.module.set_rng_state(state)
