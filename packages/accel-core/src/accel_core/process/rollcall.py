"""Debug mode: before an operation between ranks, each says where it is and looks whether the others are there too.

The roll is kept in the store of the process group, apart from the collectives, so it works while those would hang. It
costs about a millisecond an operation and runs only with ACCELERATE_DEBUG_MODE.
"""

from __future__ import annotations

import json
import time
from dataclasses import field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from accel_core._records import record
from accel_core.errors import RankDisagreementError
from accel_core.host import environ
from accel_core.process import callsite
from accel_core.process.world import World

__all__ = ["arrive"]

_PATIENCE = 8
"""Seconds to wait for the other ranks, unless ACCELERATE_DEBUG_TIMEOUT says otherwise."""


@record
class _Roll:
    """What this process knows of the roll of one process group."""

    group: Any = None
    generation: int = 0
    count: int = 0
    store: Any = field(default=None, repr=False)


_roll = _Roll()


def arrive(world: World, operation: str) -> None:
    """Report this rank at an operation and wait until all ranks are at the same one.

    Args:
        world: The processes.
        operation: Name of the operation, as the user called it.

    Raises:
        RankDisagreementError: A rank is at another operation, or does not come within ACCELERATE_DEBUG_TIMEOUT seconds
            (8 by default; raise it where one rank works alone for longer). Every rank that came raises.
    """
    site = callsite.find()
    roll, number = _next()
    record = json.dumps({"operation": operation, "site": site, "number": number})
    roll.store.set(f"{number}/{world.rank}", record)
    roll.store.set(f"last/{world.rank}", record)
    patience = environ.integer("ACCELERATE_DEBUG_TIMEOUT", _PATIENCE) or _PATIENCE
    absent = _wait(roll.store, number, world.size, patience)
    if not absent and roll.store.check([f"{number}/abandoned"]):
        absent = json.loads(roll.store.get(f"{number}/abandoned"))
    if absent:
        roll.store.set(f"{number}/abandoned", json.dumps(absent))
    views = [_view(roll.store, number, rank, rank in absent) for rank in range(world.size)]
    if absent or len({view["operation"] for view in views}) > 1:
        raise RankDisagreementError(_message(views, absent, patience))
    if number > 2:
        roll.store.delete_key(f"{number - 2}/{world.rank}")


def _next() -> tuple[_Roll, int]:
    group = dist.group.WORLD
    if _roll.group is not group:
        _roll.group, _roll.generation, _roll.count = group, _roll.generation + 1, 0
        store = dist.distributed_c10d._get_default_store()
        _roll.store = PrefixStore(f"accel/roll/{_roll.generation}", store)
    _roll.count += 1
    return _roll, _roll.count


def _wait(store: Any, number: int, size: int, patience: float) -> list[int]:
    """Wait for every rank's record and return the ranks that did not come."""
    deadline = time.monotonic() + patience
    for rank in range(size):
        left = max(0.001, deadline - time.monotonic())
        try:
            store.wait([f"{number}/{rank}"], timedelta(seconds=left))
        except RuntimeError:
            return [other for other in range(size) if not store.check([f"{number}/{other}"])]
    return []


def _view(store: Any, number: int, rank: int, is_absent: bool) -> dict[str, Any]:
    if not is_absent:
        view: dict[str, Any] = json.loads(store.get(f"{number}/{rank}"))
        return view
    if store.check([f"last/{rank}"]):
        last = json.loads(store.get(f"last/{rank}"))
        return {"operation": "nowhere", "site": f"last seen in {last['operation']} at {last['site']}"}
    return {"operation": "nowhere", "site": "never seen in any operation"}


def _message(views: list[dict[str, Any]], absent: list[int], patience: float) -> str:
    lines = [f"  rank {rank}: {view['operation']} at {view['site']}" for rank, view in enumerate(views)]
    if absent:
        lines = [line.replace(": nowhere at", ": not here;") for line in lines]
        what = f"Ranks {absent} did not come to an operation of all ranks within {patience} seconds"
        todo = (
            "Look for a branch on the rank, an early break or an error on those ranks. "
            "If they only work longer, set ACCELERATE_DEBUG_TIMEOUT to more seconds."
        )
    else:
        what = "Ranks are in different operations"
        todo = "Make every rank call the same operations in the same order: look for a branch on the rank."
    return "\n".join([f"{what}:", *lines, todo])
