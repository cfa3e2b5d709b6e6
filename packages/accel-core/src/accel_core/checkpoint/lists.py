"""How many ranks agree on the files of a save without telling one another what they are.

Each writes a list of its own files, in the form of a manifest. One reduction of a few numbers then shows whether the
files that all wrote are those that lie there, by names and sizes; only where they are not do ranks exchange them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from accel_core._records import record
from accel_core.checkpoint import names
from accel_core.checkpoint.manifest import TOTAL_BITS, Entry, Manifest, total_of
from accel_core.checkpoint.ranks import Ranks

__all__ = ["compare", "notes_of_all", "ranges", "words_of", "write"]

_NAME = re.compile(names.list_name(0).replace("0", r"(\d+)"))
_WORD = 32
"""Bits of a number that is summed over ranks: 64 hold the sum of billions."""


@record
class _Told:
    """What ranks said of their shared parts when they told it last."""

    save: str = ""  # in which save; the same on all ranks that took part in it
    mine: Mapping[str, object] = field(default_factory=dict)
    everybody: list[dict[str, object]] | None = None  # on ranks that needed it


_told = _Told()


def write(folder: Path, manifest: Manifest, rank: int) -> Entry:
    """Write the list of a rank's files."""
    (folder / names.LISTS_NAME).mkdir(exist_ok=True)
    return manifest.write(folder, names.list_name(rank))


def compare(ranks: Ranks, written: Iterable[Entry], found: Mapping[str, int] | None) -> tuple[int, bool]:
    """Return how many disks there are, and whether all that was written was found; every rank calls it.

    `found` are names and sizes of all files on a disk, on the rank that completes it.
    """
    differ = total_of((each.name, each.size) for each in written) - total_of((found or {}).items())
    disks, *sums = ranks.total([found is not None, *words_of(differ)])
    return disks, not sum(word << _WORD * place for place, word in enumerate(sums)) % (1 << TOTAL_BITS)


def words_of(total: int) -> list[int]:
    """Return a total as numbers that can be summed, each by itself."""
    return [total >> shift & ((1 << _WORD) - 1) for shift in range(0, TOTAL_BITS, _WORD)]


def ranges(files: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """Return the ranks whose lists are among some files, as the first and the last of those that follow one another.

    >>> ranges(["model.safetensors", "accel_manifest/1.json", "accel_manifest/2.json", "accel_manifest/7.json"])
    ((1, 2), (7, 7))
    """
    found: list[tuple[int, int]] = []
    for rank in sorted(int(match[1]) for match in map(_NAME.fullmatch, files) if match):
        found.append((found.pop()[0] if found and found[-1][1] == rank - 1 else rank, rank))
    return tuple(found)


def notes_of_all(ranks: Ranks, mine: dict[str, object], save: str, needs: bool) -> Sequence[Mapping[str, object]]:
    """Return what each rank has to say of its shared parts, exchanged only if it is another for any than last time.

    On a rank that `needs` none of it, nothing.
    """
    global _told
    holds = _told.mine == mine and (not needs or _told.everybody is not None)
    known = ranks.exchange((_told.save, holds))
    if len(set(known)) > 1 or not holds:
        everybody = ranks.exchange(mine)
        _told = _Told(save, mine, everybody if needs else None)
    return _told.everybody or []
