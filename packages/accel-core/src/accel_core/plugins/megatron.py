"""The old path of `accel_megatron.plugin`."""

from accel_core.options.engines import attach_moved

__getattr__ = attach_moved(__name__, "accel_megatron.plugin")
