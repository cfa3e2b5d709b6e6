"""Where each parameter's values lie among the parts that the ranks of ZeRO hold, by arithmetic alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from accel_core._records import record

SHARDED_STAGE = 3
"""The ZeRO stage that shards weights."""


@record(frozen=True)
class Stretch:
    """Values of a parameter that lie one after the other in a rank's part of a group."""

    rank: int  # who holds them
    group: int  # number of the group of parameters
    offset: int  # where they begin in that rank's part of the group
    begin: int  # where they begin in the parameter, seen flat
    size: int  # how many they are


Layout = Mapping[str, tuple[Stretch, ...]]
"""The stretches of each parameter, in their order."""

_Shapes = Sequence[Mapping[str, Sequence[int]]]


def of_groups(shapes: _Shapes, lengths: Sequence[int], gaps: Sequence[Sequence[int]] | None = None) -> Layout:
    """Return the layout of stages 1 and 2, which lay a group's parameters end to end and cut the whole equally."""
    found: dict[str, tuple[Stretch, ...]] = {}
    for group, named in enumerate(shapes):
        position = 0
        for index, (name, shape) in enumerate(named.items()):
            count = math.prod(shape)
            found[name] = tuple(_cut(group, lengths[group], position, count))
            position += count + (gaps[group][index] if gaps else 0)
    return found


def _cut(group: int, length: int, position: int, count: int) -> Iterator[Stretch]:
    begin = 0
    while begin < count:
        rank, offset = divmod(position + begin, length)
        size = min(count - begin, length - offset)
        yield Stretch(rank, group, offset, begin, size)
        begin += size


def of_parameters(shapes: _Shapes, ranks: int) -> Layout:
    """Return the layout of stage 3, which cuts every parameter in equal parts and lays a rank's parts end to end."""
    found: dict[str, tuple[Stretch, ...]] = {}
    for group, named in enumerate(shapes):
        offset = 0
        for name, shape in named.items():
            count = math.prod(shape)
            part = part_of(count, ranks)
            found[name] = tuple(
                Stretch(rank, group, offset, rank * part, min(part, count - rank * part))
                for rank in range(ranks)
                if rank * part < count
            )
            offset += part
    return found


def part_of(count: int, ranks: int) -> int:
    """Return how many of `count` values each rank has room for in stage 3."""
    return -(-count // ranks)
