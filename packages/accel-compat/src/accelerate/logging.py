"""The names of `accelerate.logging` in Accelerate, imported from where accel defines them."""

from accel_core.logging import (
    MultiProcessAdapter,
    get_logger,
)
from accel_core.state.process import (
    PartialState,
)
from accelerate._rebinding import write_through

__all__ = [
    "MultiProcessAdapter",
    "PartialState",
    "get_logger",
]

write_through(__name__)
