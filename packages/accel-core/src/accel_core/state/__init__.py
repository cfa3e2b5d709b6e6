"""Views for users: the process, the run and the step, each a shared object that anybody may make again."""

from accel_core.process import world as _world
from accel_core.state.gradient import GradientState
from accel_core.state.process import PartialState, do_nothing
from accel_core.state.run import AcceleratorState, is_initialized

__all__ = [
    "AcceleratorState",
    "GradientState",
    "PartialState",
    "any_set",
    "do_nothing",
    "is_initialized",
    "reset_all",
]


def any_set() -> bool:
    """Return whether any of the three views holds something."""
    return bool(PartialState._shared_state or AcceleratorState._shared_state or GradientState._shared_state)


def reset_all() -> None:
    """Empty the three views and forget the world; a process group stays as it is."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    _world.forget()
