"""The names of `accelerate.logging` in Accelerate, imported from where accel defines them."""

from accel_core.logging import MultiProcessAdapter as MultiProcessAdapter
from accel_core.logging import get_logger as get_logger
from accel_core.state.process import PartialState as PartialState
from accelerate import _rebinding

_rebinding.write_through(__name__)
