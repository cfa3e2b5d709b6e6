"""Installed distributions and their entry points, of which `importlib.metadata` alone takes 30 ms to import."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from pathlib import Path


def _texts() -> dict[str, str]:
    """Return what each distribution says of its entry points, by its name; the first on the path counts."""
    found: dict[str, str] = {}
    for place in dict.fromkeys(sys.path):
        with contextlib.suppress(OSError):  # of a place that is not there, or a current folder that was deleted
            for name, text in _texts_in(os.path.abspath(place), os.stat(place or ".").st_mtime_ns).items():
                found.setdefault(name, text)
    return found


@functools.lru_cache(maxsize=64)
def _texts_in(place: str, _: int) -> dict[str, str]:
    """Read a folder once for each time of its last change, or an archive as `importlib.metadata` does."""
    if os.path.isdir(place):
        with os.scandir(place) as entries:
            folders = [entry for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))]
        return {_named(os.path.splitext(folder.name)[0].partition("-")[0]): _text(folder.path) for folder in folders}
    archive = importlib.import_module("importlib.metadata").distributions(path=[place])
    return {_named(str(each.name)): each.read_text("entry_points.txt") or "" for each in archive}


def _named(folder: str) -> str:
    return folder.lower().replace("_", "-")


def _text(folder: str) -> str:
    try:
        return Path(folder, "entry_points.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def distributions() -> list[str]:
    """Return the names of installed distributions."""
    return list(_texts())


def version_of(distribution: str) -> str | None:
    """Return the version of a distribution, or `None` where it is not installed."""
    metadata = importlib.import_module("importlib.metadata")
    try:
        return str(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None


def points_of(group: str) -> dict[str, str]:
    """Return `module:name` by the name of the entry point, in the order of names."""
    lines = [line.partition("=") for text in _texts().values() for line in _lines(text, group)]
    # The first on the path counts, and extras that it names are nothing to import.
    found = {name.strip(): value.partition("[")[0].strip() for name, _, value in reversed(lines)}
    return dict(sorted(found.items()))


def _lines(text: str, group: str) -> list[str]:
    section = text.partition(f"[{group}]")[2].partition("\n[")[0]
    return [line for line in section.splitlines() if "=" in line and not line.startswith("#")]
