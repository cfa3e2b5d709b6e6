"""The names of `accelerate.commands.merge` in Accelerate, imported from where accel defines them."""

from accelerate._engines import (
    merge_fsdp_weights,
)
from accelerate._rebinding import write_through

__all__ = [
    "merge_fsdp_weights",
]

write_through(__name__)
