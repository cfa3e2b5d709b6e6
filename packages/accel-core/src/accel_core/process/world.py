"""The process and the group that it belongs to: facts that hold until the process ends."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public; its module does not list it

from accel_core._records import record
from accel_core._torch import default_store
from accel_core.devices import registry
from accel_core.devices.device import Device
from accel_core.errors import CollectiveError, ConfigurationError, StateError, expect_one_of
from accel_core.host import environ
from accel_core.host.affinity import set_numa_affinity
from accel_core.options.engines import flagged
from accel_core.options.enums import DistributedType
from accel_core.process import rendezvous
from accel_core.process.store import LOOPBACK_METHOD, listens_on_loopback

_HOST_BACKENDS = ("gloo", "mpi", "ucc")
"""Process-group backends that move tensors on the CPU, whatever else they move."""

_TEARDOWN_GRACE_S = 0.02
"""Seconds that threads of a process group have to release tensors after it ends."""
_JOINING = timedelta(seconds=30)
"""How long a rank waits until all others are connected."""
_MAX_REASON, _ENDED = 1000, "ended"
_joins = itertools.count(1)
_join_key = ""
_left: object = None
_leaving: list[Callable[[], None]] = []


@record(frozen=True)
class GroupNeeds:
    """What a process group has to do beyond joining several processes on their devices.

    Attributes:
        alone: It is there for one process too, as sharding and offloading want one to work with.
        host: It moves tensors on the CPU too, where weights and gradients are that a device offloads.
    """

    alone: bool = False
    host: bool = False


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
        """Whether this is rank 0 of all, and of the copy of the run that speaks for it."""
        return self.rank == 0 and _leads

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its machine, in the copy of the run that speaks for it."""
        return self.local_rank == 0 and _leads

    @property
    def is_last(self) -> bool:
        """Whether this is the highest rank."""
        return self.rank == self.size - 1

    @property
    def hardware(self) -> Device:
        """The kind of hardware behind `device`."""
        return registry.named(self.device.type)


_world: World | None = None
_leads = True
_NOTHING = GroupNeeds()
_lock = threading.RLock()


def lead(leads: bool) -> None:
    """Let the processes of this world speak for the run from now on, or leave that to those of another one."""
    global _leads
    _leads = leads


def leading() -> bool:
    """Return whether these processes print, save and track for the run, of which others may train copies."""
    return _leads


def current() -> World | None:
    """Return the world that was set up, or `None` before."""
    return _world


def ensure(cpu: bool = False, needs: GroupNeeds = _NOTHING, **init: object) -> World:
    """Return the world, setting it up from the environment on the first call.

    With several processes, this joins the process group, so every rank has to come here. A later call whose `needs`
    want a group of one process makes it.

    Raises:
        ConfigurationError: The environment contradicts itself, or the process group that is there does less than
            `needs`.
    """
    global _world
    world = _world
    if world is not None and needs == _NOTHING:
        return world
    with _lock:
        if _world is None:
            _world = _set_up(cpu, needs, init)
        elif needs.alone and not dist.is_initialized():
            backend = _join(rendezvous.locate(), _world.hardware, _world.device, needs, init)
            _world = replace(_world, backend=backend)
        _check_group(needs)
        if _world is not world and _world.backend is not None:
            _at_end(_let_go)
        return _world


def forget() -> None:
    """Drop what is known of the world without leaving the process group; `ensure` then finds it again."""
    global _world
    with _lock:
        _world = None


def before_leaving(function: Callable[[], None]) -> None:
    """Have a function called before `destroy` leaves the default process group, and where the process ends."""
    _leaving.append(function)
    _at_end(function)


def _at_end(function: Callable[[], None]) -> None:
    """Have a function called where this process ends, also if multiprocessing started it; a fork does not call it."""
    multiprocessing.util.Finalize(None, function, exitpriority=0)


def destroy(group: dist.ProcessGroup | None = None) -> None:
    """Leave the process group and, for the default group, forget the world."""
    global _left
    if dist.is_initialized():
        leaving = dist.group.WORLD if group is None else None
        while leaving is not None and _leaving:
            _leaving.pop()()
        dist.destroy_process_group(group)
        if leaving is not None:
            # Kept as an object: a DDP model that outlives the group would otherwise be the last to hold it, and end it
            # with Python's lock in hand, waiting for a thread of gloo that waits for this very lock to let go of its
            # last tensor. The short sleep lets such threads come to their end.
            _left = leaving
            time.sleep(_TEARDOWN_GRACE_S)
    if group is None:
        forget()


def _check_group(needs: GroupNeeds) -> None:
    if needs.host and dist.is_initialized() and "cpu:" not in dist.get_backend_config():
        raise ConfigurationError(
            f"What is offloaded to the CPU needs a process group that moves its tensors; got {dist.get_backend()!r}. "
            "Make the Accelerator before anything else joins the processes, or name a backend for both: "
            'InitProcessGroupKwargs(backend="cuda:nccl,cpu:gloo").'
        )


def _set_up(cpu: bool, needs: GroupNeeds, init: dict[str, Any]) -> World:
    wanted = None if cpu else environ.text("ACCELERATE_TORCH_DEVICE")
    hardware = registry.choose(cpu=cpu or environ.flag("ACCELERATE_USE_CPU"), wanted=wanted)
    place = rendezvous.locate()
    if dist.is_initialized():
        place = replace(place, rank=dist.get_rank(), size=dist.get_world_size())
        place = replace(place, local_size=min(place.local_size, place.size)) if place.source != "alone" else place
    number = torch.device(wanted).index if wanted else None
    if number is not None:
        expect_one_of(range(hardware.count()), f"the number of the device {wanted!r}", number)
    device = hardware.place(place.local_rank if number is None else number)
    backend: str | None = None
    if dist.is_initialized():
        backend = str(dist.get_backend())
    elif place.size > 1 or needs.alone or ("init_method" in init and _early_label() is not None):
        backend = _join(place, hardware, device, needs, init)
    if environ.flag("ACCELERATE_CPU_AFFINITY") and device.type == "cuda":
        set_numa_affinity(device.index)  # which is not the rank's where ranks share a device, or see one each
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
    """Give threads of a process group that was not left the time to let go of tensors."""
    # A thread that waits for Python's lock when Python ends is ended by it, in the middle of a C++ destructor, and that
    # ends the process with SIGABRT.
    if dist.is_initialized():
        time.sleep(_TEARDOWN_GRACE_S)


def _join(
    place: rendezvous.ProcessEnv, hardware: Device, device: torch.device, needs: GroupNeeds, init: dict[str, Any]
) -> str:
    global _join_key
    arguments = hardware.group_arguments() | {name: value for name, value in init.items() if value is not None}
    backend = _backend_for(device.type, str(arguments.pop("backend", None) or hardware.backend), needs)
    meeting_file = environ.text("ACCELERATE_DEBUG_RDV_FILE")
    if meeting_file is not None and "init_method" not in arguments:
        arguments |= {"init_method": f"file://{os.path.abspath(meeting_file)}"}
        arguments |= {"rank": place.rank, "world_size": place.size}
    elif place.size == 1 and "init_method" not in arguments:
        arguments |= {"store": HashStore(), "rank": 0, "world_size": 1}  # nobody to meet
    elif place.source != "xla":
        rendezvous.publish(place)
        if listens_on_loopback(place):
            arguments.setdefault("init_method", LOOPBACK_METHOD)
    dist.init_process_group(backend, **arguments)
    if dist.get_world_size() != place.size:
        raise StateError(
            f"The process group and the environment have as many ranks; got {dist.get_world_size()} and {place.size}. "
            "Start all processes with one launcher."
        )
    if place.size > 1:
        _join_key = f"accel/joined/{next(_joins)}"
        if "nccl" in backend:
            properties = getattr(hardware.module, "get_device_properties", lambda _: None)(device)
            _refuse_shared(place, str(device), str(getattr(properties, "uuid", "")), sees=hardware.count())
        _joined(place, connects="gloo" in backend)
    return backend


def _refuse_shared(place: rendezvous.ProcessEnv, device: str, unique: str, *, sees: int) -> None:
    """Refuse two ranks on one device, which NCCL would refuse in the first collective, or wait there without an end.

    Devices are told apart by what is unique to each: ranks that see one device each may see different ones.

    Raises:
        ConfigurationError: Two ranks of the group have the device of the same name.
    """
    store = default_store()
    owner = store.compare_set(f"{_join_key}/on/{unique or place.rank}", "", str(place.rank)).decode()
    if owner != str(place.rank):
        store.compare_set(f"{_join_key}/shared", "", f"ranks {owner} and {place.rank} on {device}")
    if store.add(f"{_join_key}/placed", 1) == place.size:
        store.set(f"{_join_key}/all_placed", "yes")
    if place.local_size <= sees and owner == str(place.rank) and environ.text("ACCELERATE_TORCH_DEVICE") is None:
        return  # each rank of this machine has its own, and nobody waits
    with contextlib.suppress(dist.DistError):  # a rank died meanwhile, which the first collective says
        store.wait([f"{_join_key}/all_placed"])
    if store.check([f"{_join_key}/shared"]):
        found = store.get(f"{_join_key}/shared").decode()
        time.sleep(_TEARDOWN_GRACE_S)  # rank 0's store ends with its group, and the others read it
        dist.destroy_process_group()
        raise ConfigurationError(
            f"NCCL takes one rank for each GPU; got {found}, where {sees} can be seen and {place.local_size} processes "
            "run. Start fewer processes (--num-processes), compute on the CPU (--cpu), or pass "
            'InitProcessGroupKwargs(backend="gloo"), with which ranks share a GPU.'
        )


def _joined(place: rendezvous.ProcessEnv, *, connects: bool) -> None:
    """Wait until all ranks are connected, and have this one say how it ends to those that may wait for it."""
    store, word, process = default_store(), _join_key, os.getpid()
    # gloo connects each pair of ranks, and a rank that is done could end while another still connects: that one would
    # fail with "Connection closed by peer".
    if connects:
        if store.add(word, 1) == place.size:
            store.set(f"{word}/all", "yes")
        with contextlib.suppress(dist.DistError):  # a rank died meanwhile, which the first collective says
            store.wait([f"{word}/all"], _JOINING)

    def leave() -> None:
        failure = sys.exc_info()[1] or getattr(sys, "last_value", None)
        # A fork has this process's connection to the store. A collective's failure is another rank's.
        if os.getpid() == process and not isinstance(failure, CollectiveError):
            failed = failure is not None and not isinstance(failure, SystemExit)
            with contextlib.suppress(dist.DistError):
                how = f"{type(failure).__name__}: {failure}"[:_MAX_REASON] if failed else _ENDED
                store.compare_set(f"{word}/{place.rank}", "", how)

    # Rank 0's own store may end before the others do, and torch would print a warning for each of them.
    file_store = environ.text("ACCELERATE_DEBUG_RDV_FILE") is not None
    if place.rank == 0 or file_store or environ.text("TORCHELASTIC_USE_AGENT_STORE") == "True":
        before_leaving(leave)


def ended(size: int) -> dict[int, str]:
    """Return which of so many ranks ended or left the process group, each with its error; an empty text without one."""
    found: dict[int, str] = {}
    with contextlib.suppress(RuntimeError, ValueError):  # the store went with its rank, or the group is gone
        store = default_store()
        for rank in range(size):
            if store.check([f"{_join_key}/{rank}"]):
                found[rank] = store.get(f"{_join_key}/{rank}").decode(errors="replace")
    return {rank: "" if how == _ENDED else how for rank, how in found.items()}


def _backend_for(device: str, backend: str, needs: GroupNeeds) -> str:
    """Return a backend that moves tensors of the device, and where asked those on the CPU."""
    if not needs.host or device == "cpu" or ":" in backend or backend in _HOST_BACKENDS:
        return backend
    return f"{device}:{backend},cpu:gloo"


def _early_label() -> DistributedType | None:
    """Return the label of the engine whose variable gives it to the process already, if there is one."""
    return next((DistributedType[engine.label] for engine in flagged() if engine.labels_process), None)


def _label(hardware: Device, size: int) -> DistributedType:
    """Return the label that users read before a strategy is chosen."""
    early = _early_label()
    if early is not None:
        return early
    return hardware.label if size > 1 or hardware.label is DistributedType.XLA else DistributedType.NO


def _share_cores(local_size: int) -> None:
    """Give each process of this machine its part of the cores, unless the user said how many threads."""
    if environ.text("OMP_NUM_THREADS") is None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
