"""The process and the group that it belongs to: facts that hold until the process ends."""

from __future__ import annotations

import atexit
import os
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from accel_core._records import record
from accel_core.devices import registry
from accel_core.devices.device import Device
from accel_core.errors import ConfigurationError, StateError
from accel_core.host import environ
from accel_core.host.affinity import set_numa_affinity
from accel_core.options.enums import DistributedType
from accel_core.process import rendezvous

__all__ = ["World", "current", "destroy", "ensure", "forget"]

_LETTING_GO = 0.02
"""Seconds that threads of a process group have to let go of tensors once it was left."""
_left: object = None


@record(frozen=True)
class World:
    """This process among its fellows.

    Attributes:
        rank: Number of the process.
        size: Number of processes.
        local_rank: Number of the process on its machine.
        local_size: Number of processes on its machine.
        device: The device that the process computes on.
        backend: Process-group backend, such as `gloo`; `None` where there is no group.
        base_label: What `distributed_type` is before a strategy refines it.
        fork_launched: Whether a notebook launcher forked this process.
        debug: Whether collectives are checked across ranks (ACCELERATE_DEBUG_MODE).
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str | None
    base_label: DistributedType
    fork_launched: bool = False
    debug: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0 of all."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the highest rank."""
        return self.rank == self.size - 1

    @property
    def hardware(self) -> Device:
        """The kind of hardware behind `device`."""
        return registry.named(self.device.type)


_world: World | None = None
_lock = threading.RLock()


def current() -> World | None:
    """Return the world that was set up, or `None` before."""
    return _world


def ensure(cpu: bool = False, **init: object) -> World:
    """Return the world, setting it up from the environment on the first call.

    With several processes, this joins the process group, so every rank has to come here.

    Args:
        cpu: Compute on the CPU whatever hardware is here.
        **init: Passed to `torch.distributed.init_process_group` (`backend`, `init_method`, `timeout` …).

    Raises:
        ConfigurationError: The environment contradicts itself, or `cpu=True` comes after a GPU was taken.
    """
    global _world
    world = _world
    if world is not None:
        return world
    with _lock:
        if _world is None:
            _world = _set_up(cpu or environ.flag("ACCELERATE_USE_CPU"), init)
        return _world


def forget() -> None:
    """Drop what is known of the world without leaving the process group; `ensure` then finds it again."""
    global _world
    with _lock:
        _world = None


def destroy(group: dist.ProcessGroup | None = None) -> None:
    """Leave the process group and, for the default group, forget the world.

    The default group that was left last is kept as an object. A DDP model that outlives it would otherwise be the last
    to hold it and end it with Python's lock in hand, waiting for a thread of gloo that waits for this very lock to let
    go of its last tensor. The short sleep lets such threads come to their end.

    Args:
        group: A group of `torch.distributed`, or `None` for the default one.
    """
    global _left
    if dist.is_initialized():
        leaving = dist.group.WORLD if group is None else None
        dist.destroy_process_group(group)
        if leaving is not None:
            _left = leaving
            time.sleep(_LETTING_GO)
    if group is None:
        forget()


def _set_up(cpu: bool, init: dict[str, Any]) -> World:
    wanted = environ.text("ACCELERATE_TORCH_DEVICE")
    hardware = registry.choose(cpu=cpu, wanted=wanted)
    place = rendezvous.locate()
    if dist.is_initialized():
        place = replace(place, rank=dist.get_rank(), size=dist.get_world_size())
        place = replace(place, local_size=min(place.local_size, place.size)) if place.source != "alone" else place
    device = torch.device(wanted) if wanted and not cpu else hardware.place(place.local_rank)
    backend: str | None = None
    if dist.is_initialized():
        backend = str(dist.get_backend())
    elif place.size > 1 or ("init_method" in init and environ.text("ACCELERATE_USE_DEEPSPEED") == "true"):
        backend = _join(place, hardware, device, init)
    if backend is not None:
        atexit.unregister(_let_go)
        atexit.register(_let_go)
    if environ.flag("ACCELERATE_CPU_AFFINITY"):
        set_numa_affinity(place.local_rank)
    if place.size > 1 and device.type == "cpu":
        _share_cores(place.local_size)
    debug = environ.flag("ACCELERATE_DEBUG_MODE")
    return World(
        rank=place.rank,
        size=place.size,
        local_rank=place.local_rank,
        local_size=place.local_size,
        device=device,
        backend=backend,
        base_label=_label(hardware, place.size),
        fork_launched=environ.flag("FORK_LAUNCHED"),
        debug=debug,
    )


def _let_go() -> None:
    """Give threads of a process group that was not left the time to let go of tensors.

    One that waits for Python's lock when Python ends is ended by it, in the middle of a C++ destructor, and that ends
    the process with SIGABRT.
    """
    if dist.is_initialized():
        time.sleep(_LETTING_GO)


def _join(place: rendezvous.ProcessEnv, hardware: Device, device: torch.device, init: dict[str, Any]) -> str:
    arguments = {name: value for name, value in init.items() if value is not None}
    backend = str(arguments.pop("backend", None) or hardware.backend)
    timeout = arguments.get("timeout")
    if timeout is not None and not isinstance(timeout, timedelta):
        raise ConfigurationError(
            f"The timeout of a process group must be a datetime.timedelta; got {timeout!r}. "
            "Write for example timedelta(seconds=1800)."
        )
    meeting_file = environ.text("ACCELERATE_DEBUG_RDV_FILE")
    if meeting_file is not None and "init_method" not in arguments:
        arguments |= {"init_method": f"file://{os.path.abspath(meeting_file)}"}
        arguments |= {"rank": place.rank, "world_size": place.size}
    else:
        rendezvous.publish(place)
    if not dist.is_backend_available(backend.split(":")[-1]) and ":" not in backend:
        raise ConfigurationError(
            f"The process-group backend {backend!r} is not part of torch {torch.__version__}; the device is "
            f"{device}. Pass InitProcessGroupKwargs(backend=...) with one that is, such as gloo."
        )
    dist.init_process_group(backend, **arguments)
    if dist.get_world_size() != place.size:
        raise StateError(
            f"The process group has {dist.get_world_size()} ranks and the environment says {place.size}. "
            "Start all processes with one launcher."
        )
    return backend


def _label(hardware: Device, size: int) -> DistributedType:
    """Return the label that users read before a strategy is chosen."""
    if environ.flag("ACCELERATE_USE_DEEPSPEED"):
        return DistributedType.DEEPSPEED
    return hardware.label if size > 1 or hardware.label is DistributedType.XLA else DistributedType.NO


def _share_cores(local_size: int) -> None:
    """Give each process of this machine its part of the cores, unless the user said how many threads."""
    if environ.text("OMP_NUM_THREADS") is None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
