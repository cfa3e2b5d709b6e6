"""Who may go on, and who waits: barriers, main-process-first blocks, functions of chosen ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from accel_core.errors import RemoteRankError
from accel_core.process import rollcall
from accel_core.process.world import World

__all__ = ["main_first", "only_when", "wait_for_all"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def wait_for_all(world: World) -> None:
    """Stop until every rank has come here; with one process, return at once."""
    if world.size > 1:
        if world.debug:
            rollcall.arrive(world, "wait_for_everyone")
        dist.barrier(device_ids=[world.device.index or 0] if world.device.type == "cuda" else None)


@contextmanager
def main_first(world: World, is_first: bool) -> Iterator[None]:
    """Let one rank of each group through the block before the others.

    Args:
        world: The processes.
        is_first: Whether this rank goes first.

    Raises:
        RemoteRankError: A rank that went first raised; its own error leaves the block on that rank, and no rank waits
            for one that is gone.
    """
    if world.size == 1:
        yield
        return
    if is_first:
        try:
            yield
        except BaseException:
            _tell(world, failed=True)
            raise
        _tell(world, failed=False)
    else:
        if _tell(world, failed=False):
            raise RemoteRankError(
                f"The main process raised inside a main-process-first block; rank {world.rank} found out while it "
                "waited and did not enter. The error is in the main process's output."
            )
        yield


def _tell(world: World, failed: bool) -> bool:
    """Meet all ranks and return whether any of them failed."""
    if world.debug:
        rollcall.arrive(world, "main_process_first")
    verdict = torch.tensor([int(failed)], device=world.device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
    return bool(verdict.item())


def only_when(chosen: bool, function: Callable[_P, _R]) -> Callable[_P, _R | None]:
    """Make `function` run where `chosen` holds, and do nothing and return `None` elsewhere."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        return function(*args, **kwargs) if chosen else None

    return run
