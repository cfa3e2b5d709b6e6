"""The calls that trackers did not take, as a file of JSON lines beside the run."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accel_core.tracking.queues import Call, describe_error

PREFIX = "undelivered-"
"""What the names of these files begin with; they end in `.jsonl`."""


class Undelivered:
    """Writes calls to a file, a line each: `run`, `project`, `tracker`, `time`, `method`, `step`, `args`, `kwargs`.

    Tensors and arrays are written as numbers or nested lists, and anything else that JSON has no form for as text.

    Attributes:
        path: The file, which is made with its first line.
        kept: How many lines of each tracker the file has.
        lost: How many calls of each tracker could not be written.
        error: Why the last of these could not be written.
    """

    def __init__(self, folder: Path, run_id: str, project: str) -> None:
        self.path = folder / f"{PREFIX}{run_id}.jsonl"
        self.kept: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.error: str | None = None
        self._run = {"run": run_id, "project": project}
        self._lock = threading.Lock()

    def write(self, tracker: str, calls: Iterable[Call]) -> None:
        """Append calls of a tracker; what cannot be written is counted. Safe from several threads."""
        with self._lock:
            for call in calls:
                line = {**self._run, "tracker": tracker, **call._asdict()}
                try:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    with open(self.path, "a", encoding="utf-8") as file:
                        file.write(json.dumps(line, default=_plain) + "\n")
                    self.kept[tracker] += 1
                # The disk may be full, and a user's value may raise anything when it is read.
                except Exception as error:
                    self.lost[tracker] += 1
                    self.error = describe_error(error)


def _plain(value: Any) -> object:
    """Turn a value that JSON has no form for into one that it has."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return list(value)
    if hasattr(value, "tolist") and hasattr(value, "shape"):  # a tensor or an array
        return value.item() if math.prod(value.shape) == 1 else value.tolist()
    return str(value)
