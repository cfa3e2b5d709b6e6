"""The old path of FSDP's plugin, which accel-parallel has."""

from accel_core.options.engines import attach_moved

__getattr__ = attach_moved(__name__, "fsdp")
