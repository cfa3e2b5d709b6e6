"""Axes along which ranks share a replica, as every part of accel knows them; imports nothing of them."""

from accel_core.options.engines import Engine

__all__ = ["CONTEXT", "ENGINE", "TENSOR"]

ENGINE = Engine(
    "mesh",
    "axes of a mesh",
    strategy="accel_core.strategies.mesh.strategy:MeshStrategy",
    plugin="accel_core.plugins.parallelism:TorchTensorParallelPlugin",
    argument="torch_tp_plugin",
    claims="accel_core.strategies.registry:needs_mesh",
)
CONTEXT = Engine("cp", "context parallel", "torch")
TENSOR = Engine("tp", "tensor parallel", "torch")
