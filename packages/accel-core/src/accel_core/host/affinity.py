"""Processors, GPUs and their drivers as the machine shows them, and which processors this process runs on."""

from __future__ import annotations

import importlib
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

from accel_core.host import availability, environ

_logger = logging.getLogger(__name__)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the processors that are nearest to its GPU, whatever it was bound to before.

    Linux only; without a CUDA device nothing happens.

    Args:
        local_process_index: Number of the process on this machine; its GPU has the same number.
        verbose: Log the processors; by default as ACCELERATE_DEBUG_MODE says.

    Examples:
        >>> override_numa_affinity(accelerator.local_process_index, verbose=True)
    """
    if not availability.is_cuda_available() or not hasattr(os, "sched_setaffinity"):
        return
    properties = importlib.import_module("torch").cuda.get_device_properties(local_process_index)
    processors = _processors_near(properties)
    if not processors:
        return
    os.sched_setaffinity(0, processors)
    if environ.flag("ACCELERATE_DEBUG_MODE") if verbose is None else verbose:
        _logger.info("Process %s runs on processors %s.", local_process_index, sorted(processors))


def _processors_near(properties: Any) -> set[int]:
    """Read from Linux which processors share a NUMA node with a GPU."""
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    listing = Path("/sys/bus/pci/devices", address, "local_cpulist")
    return parse_processors(listing.read_text()) if listing.exists() else set()


def parse_processors(listing: str) -> set[int]:
    """Parse a list of processors in Linux's notation.

    >>> sorted(parse_processors("0-2,5"))
    [0, 1, 2, 5]
    """
    spans = [part.partition("-") for part in listing.strip().split(",") if part]
    return {number for first, _, last in spans for number in range(int(first), int(last or first) + 1)}


@cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the processors that are nearest to its GPU, once; later calls do nothing.

    Args:
        local_process_index: Number of the process on this machine; its GPU has the same number.
        verbose: Log the processors; by default as ACCELERATE_DEBUG_MODE says.

    Examples:
        >>> set_numa_affinity(accelerator.local_process_index)  # before the workers of a loader start
    """
    override_numa_affinity(local_process_index=local_process_index, verbose=verbose)
