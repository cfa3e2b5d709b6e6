"""The names of `accelerate.utils.tqdm` in Accelerate, imported from where accel defines them."""

from accel_core.state.process import (
    PartialState,
)
from accel_core.tqdm import (
    tqdm,
)
from accelerate._availability import (
    is_tqdm_available,
)
from accelerate._rebinding import write_through

__all__ = [
    "PartialState",
    "is_tqdm_available",
    "tqdm",
]

write_through(__name__)
