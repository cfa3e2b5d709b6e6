"""Python objects across ranks, as pickles inside a frame."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

from accel_core.comm.transport import Parcel, check_rank, digest_of, open_channel
from accel_core.errors import CollectiveError, UnsupportedTypeError
from accel_core.process import world
from accel_core.process.world import World

__all__ = ["broadcast_object_list", "gather_object", "swap"]


def gather_object(object: Any) -> Any:
    """Gather the items of every rank's list into one list.

    Args:
        object: A list, or another iterable, of objects that can be pickled. Lists may have different lengths.

    Returns:
        The items of rank 0, then those of rank 1, and so on. With one process, `object` itself.

    Raises:
        CollectiveError: An object cannot be pickled; the other ranks get RemoteRankError.
        UnsupportedTypeError: `object` is not iterable.
    """
    here = world.ensure()
    if here.size == 1:
        return object
    gathered: list[Any] = []
    for part in swap(object, "gather_object", here, check=_check_iterable):
        gathered.extend(part)
    return gathered


def _check_iterable(value: Any) -> None:
    if not isinstance(value, Iterable):
        raise UnsupportedTypeError(
            f"gather_object joins the items that ranks bring, so each brings a list; got {type(value)}. "
            "Put the object into a list: gather_object([object])."
        )


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Give every rank the objects of one rank.

    Args:
        object_list: A list of objects that can be pickled; on the other ranks its items are replaced.
        from_process: The rank whose objects win.

    Returns:
        `object_list`.

    Raises:
        CollectiveError: An object cannot be pickled; the other ranks get RemoteRankError.
        ConfigurationError: There is no such rank.
        RankDisagreementError: The lists have different lengths, or `from_process` differs between ranks.
    """
    here = world.ensure()
    if here.size == 1:
        return object_list
    channel = open_channel(here)
    operation = f"broadcast_object_list(from_process={from_process})"
    with channel.taking_part(operation):
        check_rank(from_process, here.size)
        content = _pickled(list(object_list)) if here.rank == from_process else b""
    count = f"{len(object_list)} objects"
    parcel = Parcel(operation, digest_of(count), len(content), lambda: {"the list": count})
    received = channel.exchange_bytes(parcel, content)
    if here.rank != from_process:
        object_list[:] = pickle.loads(received[from_process])
    return object_list


def swap(value: Any, operation: str, here: World, check: Any = None) -> list[Any]:
    """Give every rank every rank's object, by rank.

    Args:
        value: An object that can be pickled.
        operation: Name of the operation, for errors.
        here: The processes.
        check: Called with `value` first; what it raises reaches this rank, and the others get RemoteRankError.

    Raises:
        CollectiveError: The object cannot be pickled; the other ranks get RemoteRankError.
    """
    if here.size == 1:
        return [value]
    channel = open_channel(here)
    with channel.taking_part(operation):
        if check is not None:
            check(value)
        content = _pickled(value)
    parcel = Parcel(operation, bytes(16), len(content), dict)
    return [pickle.loads(text) for text in channel.exchange_bytes(parcel, content)]


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as failure:
        raise CollectiveError(
            f"An object that goes to other ranks has to be picklable; got {type(value)} and "
            f"{type(failure).__name__}: {failure}. Send its data instead: numbers, strings, lists, dicts or tensors."
        ) from failure
