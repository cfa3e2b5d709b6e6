"""Fixtures of every test of accel-parallel."""

import sys
from pathlib import Path

from accel_testing.guards import *  # noqa: F403

sys.path.insert(0, str(Path(__file__).parent))  # for `several_ranks`
