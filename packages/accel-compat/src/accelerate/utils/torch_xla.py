"""The names of `accelerate.utils.torch_xla` in Accelerate, imported from where accel defines them."""

from accel_core.host.colab import install_xla as install_xla
from accelerate import _rebinding

_rebinding.write_through(__name__)
