"""Loaded once by the server that ranks are forked from: everything that a rank would otherwise import itself."""

import contextlib
import gc
import importlib
import pkgutil

from accel_core._records import LateInit
from accel_core.checkpoint.manifest import versions
from accel_core.options.engines import engines

for _name in (
    "accel_core.accelerator",
    "accel_core.checkpoint.load",
    "accel_core.checkpoint.save",
    "accel_core.checkpoint.shards",
    "accel_core.devices.cpu",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.fsdp",
):
    importlib.import_module(_name)
_engines = {engine.strategy.split(".")[0] for engine in engines().values() if engine.library in ("", "torch")}
for _package in ("accel_core.strategies", *sorted(_engines - {"", "accel_core"})):
    for _module in pkgutil.walk_packages(importlib.import_module(_package).__path__, f"{_package}."):
        with contextlib.suppress(ImportError):  # of an engine whose library is not installed
            importlib.import_module(_module.name)
versions()
for _each in gc.get_objects():
    if type(_each) is LateInit:  # `isinstance` would ask objects of torch that warn
        _each.make()
gc.collect()
gc.freeze()  # a rank's own collections then need not walk all of torch
