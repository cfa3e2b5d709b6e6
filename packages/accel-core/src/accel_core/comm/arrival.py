"""Waiting until every rank has called an operation, by the store of the process group, before it begins.

No collective is begun for that: where a rank trains on instead of coming, its next collective would meet ours.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from accel_core._torch import default_store
from accel_core.comm.disagreement import ranks_text
from accel_core.errors import RankDisagreementError
from accel_core.process import callsite
from accel_core.process.world import World

_calls = Counter[str]()
_LAST = "accel/arrival/last"


def arrive(world: World, operation: str, seconds: float, *, meeting: str = "", limit: str = "timeout") -> None:
    """Wait until every rank has called an operation.

    A rank that comes at the instant at which another gives up goes on alone, and loses the others in its next exchange.

    Args:
        world: The ranks.
        operation: What they call.
        seconds: How long to wait.
        meeting: Where they meet, if they may be in different operations; by default at this one.
        limit: What the user sets to wait longer.

    Raises:
        RankDisagreementError: A rank did not come within `seconds`.
    """
    if world.size == 1 or not dist.is_available() or not dist.is_initialized():
        return
    # On a connection of its own: a wait holds up all else on one, and other threads have to answer meanwhile.
    store: Any = cast(Any, default_store()).clone()
    meeting, site = meeting or operation, callsite.find()
    call = f"accel/arrival/{meeting}/{_calls[meeting]}"
    _calls[meeting] += 1
    store.set(f"{_LAST}/{world.rank}", f"{operation} at {site}")
    store.set(f"{call}/{world.rank}", "")
    if store.add(f"{call}/came", 1) == world.size:
        store.set(f"{call}/all", "")
    try:
        store.wait([f"{call}/all"], timedelta(seconds=seconds))
    except RuntimeError:
        absent = [rank for rank in range(world.size) if not store.check([f"{call}/{rank}"])]
        # Withdrawn, so that the next call of all ranks meets under the same number.
        store.delete_key(f"{call}/{world.rank}")
        store.add(f"{call}/came", -1)
        _calls[meeting] -= 1
        last = {rank: store.get(f"{_LAST}/{rank}") for rank in absent if store.check([f"{_LAST}/{rank}"])}
        seen = "".join(f"; rank {rank} was last seen in {place.decode()}" for rank, place in last.items())
        raise RankDisagreementError(
            f"{operation} was not called on every rank; {ranks_text(absent)} did not come within {seconds:g} s to "
            f"{site}{seen}. Call {operation} on all ranks, outside of any `if` on the rank, or set a longer {limit} "
            "where ranks may be that far apart."
        ) from None
    store.delete_key(f"{call}/{world.rank}")
    if store.add(f"{call}/left", 1) == world.size:
        for key in ("came", "all", "left"):
            store.delete_key(f"{call}/{key}")
