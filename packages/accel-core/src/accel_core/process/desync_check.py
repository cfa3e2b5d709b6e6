"""Debug mode: before an operation between ranks, each says where it is and looks whether the others are there too.

What ranks say is kept in the store of the process group, apart from the collectives, so it works while those would
hang. It costs about a millisecond an operation and runs only with ACCELERATE_DEBUG_MODE.
"""

from __future__ import annotations

import itertools
import json
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public; its module does not list it

from accel_core._torch import default_store
from accel_core.errors import RankDisagreementError
from accel_core.host import environ
from accel_core.process import callsite

__all__ = ["DesyncCheck"]

_PATIENCE = 8
"""Seconds to wait for the other ranks, unless ACCELERATE_DEBUG_TIMEOUT says otherwise."""
_LONG_PATIENCE = 1800
"""Seconds to wait where ranks do different amounts of work: as long as torch waits by default."""
_generations = itertools.count()


class DesyncCheck:
    """What the ranks of one process group report before each operation.

    Every rank makes it at the same point of the program: the number of those made so far keeps their keys apart, as a
    store may outlive a process group.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._count = 0
        # On a connection of its own: waiting holds up all else on one, and other threads have to answer meanwhile.
        waiting = default_store().clone()  # type: ignore[attr-defined]  # torch's stub leaves it out
        self._store: Store = PrefixStore(f"accel/desync/{next(_generations)}", waiting)

    def check_in(self, operation: str, *, patient: bool = False) -> None:
        """Report this rank at an operation and wait until all ranks are at the same one.

        Raises:
            RankDisagreementError: A rank is at another operation, or does not come within ACCELERATE_DEBUG_TIMEOUT
                seconds (8 by default; raise it where one rank works alone for longer). Every rank that came raises.
        """
        self._count += 1
        number, store = self._count, self._store
        record = json.dumps({"operation": operation, "site": callsite.find(), "number": number})
        store.set(f"{number}/{self.rank}", record)
        store.set(f"last/{self.rank}", record)
        patience = environ.integer("ACCELERATE_DEBUG_TIMEOUT", _PATIENCE) or _PATIENCE
        if patient:
            patience = max(patience, _LONG_PATIENCE)
        # What a rank finds first counts for all: one that comes while another gives up finds all records complete, and
        # must not go into the collective alone.
        found = json.dumps(self._wait(number, patience))
        absent = json.loads(store.compare_set(f"{number}/absent", "", found))
        views = [self._view(number, rank, rank in absent) for rank in range(self.size)]
        if absent or len({view["operation"] for view in views}) > 1:
            raise RankDisagreementError(_message(views, absent, patience))
        # The record before the last is read by nobody any more: all ranks were here, so all have left the last one.
        for key in (self.rank, "absent") if number > 2 else ():
            store.delete_key(f"{number - 2}/{key}")

    def _wait(self, number: int, patience: float) -> list[int]:
        """Wait for every rank's record and return the ranks that did not come."""
        deadline = time.monotonic() + patience
        for rank in range(self.size):
            left = max(0.001, deadline - time.monotonic())
            try:
                self._store.wait([f"{number}/{rank}"], timedelta(seconds=left))
            except RuntimeError:
                return [other for other in range(self.size) if not self._store.check([f"{number}/{other}"])]
        return []

    def _view(self, number: int, rank: int, is_absent: bool) -> dict[str, str]:
        if not is_absent:
            view: dict[str, str] = json.loads(self._store.get(f"{number}/{rank}"))
            return view
        if self._store.check([f"last/{rank}"]):
            last = json.loads(self._store.get(f"last/{rank}"))
            return {"operation": "nowhere", "site": f"last seen in {last['operation']} at {last['site']}"}
        return {"operation": "nowhere", "site": "never seen in any operation"}


def _message(views: list[dict[str, str]], absent: list[int], patience: float) -> str:
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
