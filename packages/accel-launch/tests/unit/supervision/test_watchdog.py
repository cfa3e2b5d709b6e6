"""What counts as progress of a rank."""

import pytest

from accel_core.host.heartbeat import Progress
from accel_launch.supervision.watchdog import progressed_at


@pytest.mark.parametrize(
    ("pulse", "expected"),
    [
        (None, 50.0),
        (Progress(0.0, 0, 0), 50.0),
        (Progress(20.0, 0, 1), 50.0),
        (Progress(20.0, 2, 1), 50.0),
        (Progress(20.0, 3, 1), 20.0),
        (Progress(60.0, 3, 1), 60.0),
        (Progress(20.0, 300, 0), 50.0),
        (Progress(60.0, 300, 0), 60.0),
    ],
)
def test_progress(pulse: Progress | None, expected: float) -> None:
    """Inside of a training loop, after its first step, batches and steps count alone; elsewhere output counts too."""
    assert progressed_at(50.0, pulse) == expected
