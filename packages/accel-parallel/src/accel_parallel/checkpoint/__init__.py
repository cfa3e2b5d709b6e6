"""Checkpoints in shards, in the format of `torch.distributed.checkpoint`."""
