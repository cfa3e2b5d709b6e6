"""The old path of Megatron's plugin, which accel-megatron has."""

from accel_core.options.engines import attach_moved

__getattr__ = attach_moved(__name__, "megatron_lm")
