"""FSDP version 2: models sharded in place by `torch.distributed.fsdp.fully_shard`."""
