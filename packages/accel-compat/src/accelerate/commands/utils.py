"""The names of `accelerate.commands.utils` in Accelerate, imported from where accel defines them."""

from accel_launch.arguments import (
    Group as CustomArgumentGroup,
)
from accel_launch.arguments import (
    Parser as CustomArgumentParser,
)
from accelerate._rebinding import write_through

__all__ = [
    "CustomArgumentGroup",
    "CustomArgumentParser",
]

write_through(__name__)
