"""Fixtures of every test of the drop-in."""

import pytest

from accel_core.plugins.loading import DataLoaderConfiguration
from accel_testing.guards import *  # noqa: F403
from accelerate import _defaults


@pytest.fixture(autouse=True)
def process_defaults() -> None:
    """Give a test the defaults of Accelerate, which tests of other packages take back, or which import accel."""
    _defaults.choose()
    DataLoaderConfiguration.default_restore_position = staticmethod(lambda: False)
