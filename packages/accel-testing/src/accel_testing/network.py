"""Machines on this one that have networks of their own: namespaces of Linux."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["DEVICE", "ip", "two_machines", "why_no_networks"]

DEVICE = "accel-v"
"""By which each of two machines sees the other one."""


def why_no_networks() -> str:
    """Return why no networks can be made here; nothing where they can."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return "network namespaces need root and iproute2"
    name = f"accel-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return "this machine allows no network namespaces" if made.returncode else ""


def ip(*words: str) -> None:
    """Change the network."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_machines(*addresses: str) -> Iterator[list[str]]:
    """Make two namespaces that reach each other at addresses, and give their names; skip where none can be made."""
    if why_no_networks():
        pytest.skip(why_no_networks())
    names = [f"accel-{os.getpid()}-{letter}" for letter in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ends = ["netns", names[0], "type", "veth", "peer", "name", DEVICE, "netns", names[1]]
        ip("link", "add", DEVICE, *ends)
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
            ip("-n", name, "link", "set", DEVICE, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
