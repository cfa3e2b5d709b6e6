"""Loaded once by the server that ranks are forked from: everything that a rank would otherwise import itself."""

import gc
import importlib

for _name in (
    "accel_core.accelerator",
    "accel_core.checkpoint.load",
    "accel_core.checkpoint.save",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
):
    importlib.import_module(_name)
gc.collect()
gc.freeze()  # a rank's own collections then need not walk all of torch
