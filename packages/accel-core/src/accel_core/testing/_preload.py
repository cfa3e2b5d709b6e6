"""Loaded once by the server that ranks are forked from: everything that a rank would otherwise import itself."""

import contextlib
import gc
import importlib
import pkgutil

import accel_core.strategies

for _name in (
    "accel_core.accelerator",
    "accel_core.checkpoint.load",
    "accel_core.checkpoint.save",
    "accel_core.checkpoint.shards",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
):
    importlib.import_module(_name)
for _module in pkgutil.walk_packages(accel_core.strategies.__path__, "accel_core.strategies."):
    with contextlib.suppress(ImportError):  # of an engine whose library is not installed
        importlib.import_module(_module.name)
gc.collect()
gc.freeze()  # a rank's own collections then need not walk all of torch
