"""The old path of DeepSpeed's plugin, which accel-deepspeed has."""

from accel_core.options.engines import attach_moved

__getattr__ = attach_moved(__name__, "deepspeed")
