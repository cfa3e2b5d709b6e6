"""The names of `accelerate.commands` in Accelerate, imported from where accel defines them."""

from accelerate import _rebinding

_rebinding.write_through(__name__)
