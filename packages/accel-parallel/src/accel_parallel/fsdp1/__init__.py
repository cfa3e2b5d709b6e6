"""FSDP version 1: models wrapped by `torch.distributed.fsdp.FullyShardedDataParallel`."""
