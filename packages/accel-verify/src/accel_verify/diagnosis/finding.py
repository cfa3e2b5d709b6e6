"""What an examination found."""

from typing import Literal, NamedTuple

from accel_core.errors import AccelError

State = Literal["ok", "warning", "problem"]
"""Nothing to do; worth a look; runs will fail or go wrong."""


class DoctorFinding(NamedTuple):
    """One thing that was examined."""

    topic: str
    state: State
    what: str
    remedy: str = ""


def ok(topic: str, what: str) -> DoctorFinding:
    """Return a finding that needs no remedy."""
    return DoctorFinding(topic, "ok", what)


def warning(topic: str, what: str, remedy: str) -> DoctorFinding:
    """Return a finding that may explain trouble but does not stop a run."""
    return DoctorFinding(topic, "warning", what, remedy)


def problem(topic: str, what: str, remedy: str) -> DoctorFinding:
    """Return a finding that makes runs fail or go wrong."""
    return DoctorFinding(topic, "problem", what, remedy)


def from_error(topic: str, error: AccelError) -> DoctorFinding:
    """Return the problem that an error describes: its message says what is wrong, and then what to do."""
    what, _, remedy = str(error).partition(". ")
    return problem(topic, what, remedy)
