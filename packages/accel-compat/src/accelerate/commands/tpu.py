"""The names of `accelerate.commands.tpu` in Accelerate, imported from where accel defines them."""

from accelerate._rebinding import write_through

__all__ = []

write_through(__name__)
