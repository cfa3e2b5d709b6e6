"""Waiting until every rank has called an operation, by the store of the process group, before it begins.

No collective is begun for that: where a rank trains on instead of coming, its next collective would meet ours.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from accel_core._torch import default_store
from accel_core.comm.disagreement import ranks_text
from accel_core.errors import RankDisagreementError
from accel_core.process import callsite
from accel_core.process.world import World

__all__ = ["arrive"]

_calls = Counter[str]()


def arrive(world: World, operation: str, seconds: float) -> None:
    """Wait until every rank has called an operation.

    A rank that comes at the instant at which another gives up goes on alone, and loses the others in its next exchange.

    Raises:
        RankDisagreementError: A rank did not come within `seconds`.
    """
    if world.size == 1 or not dist.is_available() or not dist.is_initialized():
        return
    store: Any = default_store()
    call = f"accel/arrival/{operation}/{_calls[operation]}"
    _calls[operation] += 1
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
        _calls[operation] -= 1
        raise RankDisagreementError(
            f"{operation} was not called on every rank; {ranks_text(absent)} did not come within {seconds:g} s to "
            f"{callsite.find()}. Call {operation} on all ranks, outside of any `if` on the rank, or pass a longer "
            "timeout where ranks may be that far apart."
        ) from None
    store.delete_key(f"{call}/{world.rank}")
    if store.add(f"{call}/left", 1) == world.size:
        for key in ("came", "all", "left"):
            store.delete_key(f"{call}/{key}")
