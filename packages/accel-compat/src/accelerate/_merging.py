"""Nested settings laid over each other."""

from __future__ import annotations

from typing import Any


def merge_dicts(source: dict[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Lay `source` over `destination`, level by level and in place."""
    for name, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(name, {}))
        else:
            destination[name] = value
    return destination
