"""Fixtures of every test of accel-core, and the way to what several files of tests share."""

import sys
from pathlib import Path

from accel_testing.guards import *  # noqa: F403

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("shared", "stores")]
