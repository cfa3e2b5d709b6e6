"""Entry points of installed distributions, read from their files: importlib.metadata alone takes 30 ms to import."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["names_of", "somebody_offers"]


def _files() -> Iterator[Path | None]:
    """Return every file of entry points on the path, and None for a place that is not a plain folder."""
    for place in dict.fromkeys(sys.path):
        if os.path.isdir(place or "."):
            yield from _files_in(place or ".")
        elif os.path.exists(place):
            yield None


def _files_in(folder: str) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for entry in found:
            if entry.name.endswith((".dist-info", ".egg-info")):
                yield Path(entry.path) / "entry_points.txt"


def somebody_offers(group: str) -> bool:
    """Return whether any distribution may offer an entry point of a group."""
    return any(file is None or _lines(file, group) for file in _files())


def names_of(group: str) -> list[str]:
    """Return the names of the entry points of a group, without those of zipped distributions."""
    return sorted(
        {line.partition("=")[0].strip() for file in _files() if file is not None for line in _lines(file, group)}
    )


def _lines(file: Path, group: str) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    section = text.partition(f"[{group}]")[2].partition("\n[")[0]
    return [line for line in section.splitlines() if "=" in line and not line.startswith("#")]
