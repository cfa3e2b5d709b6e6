"""The kinds of hardware that accel knows, one row each; torch-free, so that the launcher reads the same rows.

A new kind is a row here and, in `options.enums`, the member that users see. A kind that torch drives through a module
`torch.<name>` needs no code; any other has a class of its own in `accel_core.devices`.
"""

from __future__ import annotations

from accel_core._records import record
from accel_core.options.enums import DistributedType


@record(frozen=True)
class Hardware:
    """One kind of hardware.

    Attributes:
        name: The device type of torch, such as `cuda`.
        title: What people call it.
        label: What users see as `distributed_type` when several processes use it.
        backend: The process-group backend that moves its tensors between processes.
        visible_variable: The environment variable that says which devices a process may see.
        extension: The distribution that teaches torch this device, where torch does not know it by itself.
        ran_on_hardware: Whether accel's tests were ever run on it.
    """

    name: str
    title: str
    label: DistributedType
    backend: str
    visible_variable: str | None = None
    extension: str | None = None
    ran_on_hardware: bool = False


HARDWARE: tuple[Hardware, ...] = (
    Hardware("xla", "TPU and other XLA devices", DistributedType.XLA, "xla", extension="torch_xla"),
    Hardware("mlu", "Cambricon MLU", DistributedType.MULTI_MLU, "cncl", "MLU_VISIBLE_DEVICES", "torch_mlu"),
    Hardware("sdaa", "Tecorigin SDAA", DistributedType.MULTI_SDAA, "tccl", "SDAA_VISIBLE_DEVICES", "torch_sdaa"),
    Hardware("musa", "Moore Threads GPU", DistributedType.MULTI_MUSA, "mccl", "MUSA_VISIBLE_DEVICES", "torch_musa"),
    Hardware("npu", "Ascend NPU", DistributedType.MULTI_NPU, "hccl", "ASCEND_RT_VISIBLE_DEVICES", "torch_npu"),
    Hardware(
        "hpu", "Intel Gaudi HPU", DistributedType.MULTI_HPU, "hccl", "HABANA_VISIBLE_MODULES", "habana_frameworks"
    ),
    Hardware("cuda", "NVIDIA GPU", DistributedType.MULTI_GPU, "nccl", "CUDA_VISIBLE_DEVICES", ran_on_hardware=True),
    Hardware("xpu", "Intel GPU", DistributedType.MULTI_XPU, "xccl"),
    Hardware(
        "neuron", "AWS Neuron", DistributedType.MULTI_NEURON, "neuron", "NEURON_RT_VISIBLE_CORES", "torch_neuronx"
    ),
    Hardware("mps", "Apple GPU", DistributedType.NO, "gloo"),
    Hardware("cpu", "CPU", DistributedType.MULTI_CPU, "gloo", ran_on_hardware=True),
)
"""In the order in which they are asked whether they are here."""
