"""Steps of optimizers whose parameters are on different meshes, or whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_TOGETHER = ("foreach", "fused")
_UNFUSED = (torch.optim.Adagrad, torch.optim.SGD)
"""Optimizers whose fused step torch does not have for distributed tensors."""


def step_one_by_one(optimizer: torch.optim.Optimizer, may_mix: Callable[[], bool]) -> None:
    """Let an optimizer update the parameters of a group one by one where they are spread in different ways."""
    # Lists of tensors cannot mix meshes, or parts and whole tensors. During a step only: checkpoints hold the user's
    # own.
    changed: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def before(*_: object) -> None:
        for group in optimizer.param_groups:
            unfused = isinstance(optimizer, _UNFUSED) and bool(group.get("fused"))
            if not unfused and not may_mix():
                continue
            meshes = {id(each.device_mesh) if isinstance(each, DTensor) else None for each in group["params"]}
            if len(meshes) > 1 or (unfused and meshes != {None}):
                given = {name: group[name] for name in _TOGETHER if name in group}
                changed.append((group, given))
                group.update(dict.fromkeys(given, False))

    def after(*_: object) -> None:
        while changed:
            group, given = changed.pop()
            group.update(given)

    if hasattr(optimizer, "_step_supports_amp_scaling"):
        optimizer._step_supports_amp_scaling = False  # a scaler leaves unscaling to fused steps only
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
