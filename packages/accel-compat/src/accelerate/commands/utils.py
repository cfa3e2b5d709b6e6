"""The names of `accelerate.commands.utils` in Accelerate, imported from where accel defines them."""

from accel_launch import arguments
from accelerate import _rebinding

CustomArgumentGroup = arguments.Group
CustomArgumentParser = arguments.Parser

_rebinding.write_through(__name__)
