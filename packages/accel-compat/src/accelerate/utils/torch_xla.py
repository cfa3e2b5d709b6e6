"""The names of `accelerate.utils.torch_xla` in Accelerate, imported from where accel defines them."""

from accel_core.host.colab import (
    install_xla,
)
from accelerate._rebinding import write_through

__all__ = [
    "install_xla",
]

write_through(__name__)
