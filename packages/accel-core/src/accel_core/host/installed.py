"""Installed distributions; entry points are read from their files: importlib.metadata alone takes 30 ms to import."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["points_of", "somebody_offers", "version_of"]


def _files() -> Iterator[Path | None]:
    """Return every distribution's file of entry points, and None for a place on the path that is not a folder."""
    seen: set[str] = set()
    for place in dict.fromkeys(sys.path):
        if os.path.isdir(place or "."):
            yield from _files_in(place or ".", seen)
        elif os.path.exists(place):
            yield None


def _files_in(folder: str, seen: set[str]) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for entry in found:
            name = entry.name.partition("-")[0].lower()
            if entry.name.endswith((".dist-info", ".egg-info")) and name not in seen:  # the first on the path counts
                seen.add(name)
                yield Path(entry.path) / "entry_points.txt"


def version_of(distribution: str) -> str | None:
    """Return the version of a distribution, or `None` where it is not installed."""
    metadata = importlib.import_module("importlib.metadata")
    try:
        return str(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None


def somebody_offers(group: str) -> bool:
    """Return whether any distribution may offer an entry point of a group."""
    return any(file is None or _lines(file, group) for file in _files())


def points_of(group: str) -> dict[str, str]:
    """Return `module:name` by the name of the entry point, in the order of names; zipped distributions are left out."""
    lines = [line.partition("=") for file in _files() if file is not None for line in _lines(file, group)]
    found = {name.strip(): value.strip() for name, _, value in reversed(lines)}  # the first on the path counts
    return dict(sorted(found.items()))


def _lines(file: Path, group: str) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    section = text.partition(f"[{group}]")[2].partition("\n[")[0]
    return [line for line in section.splitlines() if "=" in line and not line.startswith("#")]
