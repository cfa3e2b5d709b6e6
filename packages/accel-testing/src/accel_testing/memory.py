"""By how much the memory of a process grew, as Linux tells."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

__all__ = ["MEASURES_MEMORY", "Growth"]

MEASURES_MEMORY = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is reset on Linux only"
)


class Growth:
    """By how many bytes this process's memory grows at most from now on."""

    def __init__(self) -> None:
        ctypes.CDLL(None).mallopt(-3, 2**20)  # glibc keeps no freed block, which would count as used
        self.before = self._bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")

    def most(self) -> int:
        """Return the largest growth until now."""
        return self._bytes("VmHWM") - self.before

    def _bytes(self, kind: str) -> int:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status[kind].split()[0]) * 1024
