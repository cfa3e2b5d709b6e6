"""Python objects across ranks, as pickles inside a frame or after it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from accel_core.comm.transport import Message, check_rank, digest_of, participate
from accel_core.errors import CollectiveError, PartView, expect
from accel_core.process.world import World, ensure


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
    gathered: list[Any] = []
    for part in swap(object, "gather_object", world, check=check_items):
        gathered.extend(part)
    return gathered


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
    world = ensure()
    if world.size == 1:
        return object_list
    with participate(world, f"broadcast_object_list(from_process={from_process})") as transport:
        check_rank(from_process, world.size)
        content = pickled(list(object_list)) if world.rank == from_process else memoryview(b"")
        count = f"{len(object_list)} objects"
        message = Message(digest_of(count), len(content), lambda: {"the list": PartView(count)})
        received = transport.broadcast_bytes(content, message, from_process)
        if world.rank != from_process:
            object_list[:] = pickle.loads(received)
    return object_list


def swap(
    value: object,
    operation: str,
    world: World,
    check: Callable[[Any], None] | None = None,
    *,
    group_name: str = "",
) -> list[Any]:
    """Give every rank every rank's object, by rank.

    Raises:
        CollectiveError: The object cannot be pickled; the other ranks get RemoteRankError.
    """
    if world.size == 1:
        return [value]
    with participate(world, operation, group_name) as transport:
        if check is not None:
            check(value)
        content = pickled(value)
        received = transport.exchange_bytes(content, Message(nbytes=len(content)))
    return [pickle.loads(each) for each in received]


def pickled(value: object) -> memoryview:
    """Pickle an object into memory that can be sent without a copy.

    Raises:
        CollectiveError: It cannot be pickled.
    """
    target = io.BytesIO()
    try:
        pickle.dump(value, target)
    except Exception as failure:
        raise CollectiveError(
            f"An object that goes to other ranks has to be picklable; got {type(value)} and "
            f"{type(failure).__name__}: {failure}. Send its data instead: numbers, strings, lists, dicts or tensors."
        ) from failure
    return target.getbuffer()
