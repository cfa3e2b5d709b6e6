"""Fixtures of the equivalence suite, and its one module that the tests share."""

import sys
from pathlib import Path

from accel_testing.guards import *  # noqa: F403

sys.path.insert(0, str(Path(__file__).parent))
