"""Loaded once by the server that ranks are forked from."""

import importlib

import accel_core.testing.world  # noqa: F401

for _name in ("accel_core.accelerator", "torch.nn.parallel", "torch.optim", "torch.utils.data"):
    importlib.import_module(_name)
