"""Context parallel: ranks share the sequences of a batch, whatever strategy their parameters live by."""

from __future__ import annotations

from accel_core.data.labels import shift_labels

__all__ = ["shift_labels"]
