"""AWS Trainium and Inferentia, through torch_neuronx. Never run on hardware."""

from __future__ import annotations

import torch

from accel_core.devices.device import Device
from accel_core.options.enums import DistributedType

__all__ = ["NeuronDevice"]


class NeuronDevice(Device):
    """AWS Trainium and Inferentia, through torch_neuronx. Never run on hardware."""

    name = "neuron"
    backend = "neuron"
    label = DistributedType.MULTI_NEURON
    visible_variable = "NEURON_RT_VISIBLE_CORES"

    def is_available(self) -> bool:
        """Say whether torch's extension for this device is loaded and sees one."""
        module = getattr(torch, "neuron", None)
        return module is not None and bool(module.is_available())
