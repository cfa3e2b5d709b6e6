"""XLA devices: each process computes on its own, and gradients are averaged over all of them."""

__all__ = ["WRAPPERS"]

WRAPPERS = (
    "torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel:XlaFullyShardedDataParallel",
    "torch_xla.experimental.spmd_fully_sharded_data_parallel:SpmdFullyShardedDataParallel",
)
"""`module:Class` of the wrappers by which torch_xla shards a model, in its first version of FSDP and its second."""
