"""Proofs about a script and a machine: ranks against one process, resumed against straight, and the doctor."""

from accel_verify._version import __version__

__all__ = ["__version__"]
