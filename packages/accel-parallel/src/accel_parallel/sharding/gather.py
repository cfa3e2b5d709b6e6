"""Gathers whole tensors from shards, one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accel_core.mesh.tensor import whole


@torch.no_grad()
def gather(content: Any, *, keep: bool, memo: dict[int, Any] | None = None) -> Any:
    """Return nested dicts, lists and tuples with whole tensors on the CPU in place of sharded ones.

    Every rank calls it with equal structure. One tensor at a time is whole on the device.
    """
    memo = {} if memo is None else memo
    if isinstance(content, torch.Tensor):
        if id(content) not in memo:
            found = whole(content)  # a collective, so also where nothing is kept
            # The first entry keeps the tensor alive, so that no other gets its identity.
            memo[id(content)] = content, (found.detach().cpu() if keep else None)
        return memo[id(content)][1]
    if isinstance(content, Mapping):
        return {key: gather(value, keep=keep, memo=memo) for key, value in content.items()}
    if isinstance(content, list):
        return [gather(value, keep=keep, memo=memo) for value in content]
    if type(content) is tuple:
        return tuple(gather(value, keep=keep, memo=memo) for value in content)
    return content
