"""A stand-in for torch_xla: its names as accel calls them, over the CPU and gloo, for tests of what is called when."""

import torch

syncs: list[str] = []
"""One entry for each time that the recorded operations were to be run."""


def device() -> torch.device:
    """Return the device of this process."""
    return torch.device("cpu")


def sync() -> None:
    """Note that the recorded operations are run."""
    syncs.append("sync")
