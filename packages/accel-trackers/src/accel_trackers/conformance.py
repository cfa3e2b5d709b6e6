"""What every tracker of this package has to do: the suite for all trackers, and storing one more document."""

from __future__ import annotations

import json
from typing import Any

from accel_core.testing.conformance.tracker import CONFIG, Stored, TrackerConformance
from accel_trackers.flatten import FlatConfig, flatten

__all__ = ["LibraryConformance"]


class LibraryConformance(TrackerConformance):
    """The suite for a tracker that also keeps the exact document of `values.config_table`."""

    def test_exact_configuration(self, session: dict[str, Any]) -> None:
        """The document that is stored gives the configuration back, exactly as it was nested."""
        stored: Stored = session["stored"]
        assert stored.exact is not None, "`read` has to give the exact document"
        assert FlatConfig(**json.loads(stored.exact)) == flatten(CONFIG)
