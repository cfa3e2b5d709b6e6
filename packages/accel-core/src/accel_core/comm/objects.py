"""Python objects across ranks, as pickles inside a frame or after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accel_core.comm.control import Channel
from accel_core.errors import expect
from accel_core.process.world import ensure


def gather_object(object: object) -> Any:
    """Gather the items of every rank's list into one list.

    Args:
        object: A list, or another iterable, of objects that can be pickled. Lists may have different lengths.

    Returns:
        The items of rank 0, then those of rank 1, and so on. With one process, `object` itself.

    Raises:
        CollectiveError: An object cannot be pickled; the other ranks get RemoteRankError.
        UnsupportedTypeError: `object` is one object: not iterable, a mapping, a text or bytes.

    Examples:
        >>> records = gather_object([{"rank": 0}])  # one list for each process
        >>> records[0]
        {'rank': 0}
    """
    world = ensure()
    if world.size == 1:
        return object
    parts: list[Any] = Channel(world, "gather_object").exchange(object, check_items)
    return [item for part in parts for item in part]


def check_items(value: object) -> None:
    """Refuse what has no items that could be joined with those of other ranks.

    Raises:
        UnsupportedTypeError: It is one object: not iterable, a mapping, a text or bytes.
    """
    fits = isinstance(value, Iterable) and not (isinstance(value, Mapping | str | bytes) and value)
    expect(fits, value, "The items that ranks bring are joined, so each rank brings a list", "Pass [value].")


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Give every rank the objects of one rank.

    Beside the objects themselves, a rank needs memory for one pickle of them.

    Args:
        object_list: A list of objects that can be pickled; on the other ranks its items are replaced.
        from_process: The rank whose objects win.

    Returns:
        `object_list`.

    Raises:
        CollectiveError: An object cannot be pickled; the other ranks get RemoteRankError.
        ConfigurationError: There is no such rank.
        RankDisagreementError: The lists have different lengths, or `from_process` differs between ranks.

    Examples:
        >>> settings = [{"rate": 0.1}]  # on the other processes: [None]
        >>> settings = broadcast_object_list(settings)
    """
    channel = Channel(ensure(), f"broadcast_object_list(from_process={from_process})")
    object_list[:] = channel.broadcast(list(object_list), from_process, kind=f"{len(object_list)} objects")
    return object_list
