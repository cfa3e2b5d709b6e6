"""Core and big models need no NumPy, and nobody is told that it is missing."""

import sys

from accel_testing import limits

HIDDEN = 'import sys; sys.modules["numpy"] = None; '


def errors_of(script: str) -> str:
    """Run a script in a process that has no NumPy, and return what it writes to the error stream."""
    command = [sys.executable, "-W", "always", "-c", HIDDEN + script]
    return limits.run(command, check=True, quiet=12).stderr


def test_nothing_is_said_about_numpy() -> None:
    """What torch tells of it is heard where torch comes in first, and not behind accel."""
    assert "NumPy" in errors_of("import torch")
    assert not errors_of("import accel_bigmodel, torch; torch.ones(1)")
