"""Masks of attention, as a rank needs them: its own queries against the keys of the whole sequence."""

from __future__ import annotations

import torch
import torch.distributed as dist

from accel_parallel.context.exchange import gather_whole
from accel_parallel.context.order import Share


def lacks_keys(mask: torch.Tensor, keys: int) -> bool:
    """Return whether a mask says nothing of keys that other ranks have, and differs between queries."""
    # Equal for all queries, it is a mask of padding: all ranks' parts make the whole.
    return mask.dim() > 1 and mask.shape[-1] == keys and mask.shape[-2] > 1


def own_rows(mask: torch.Tensor, queries: int, keys: int, share: Share, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a mask of this rank's queries against all keys."""
    if mask.dim() > 1 and mask.shape[-2] == queries * share.size:
        mask = Share(mask.shape[-2], share.rank, share.size).of(mask, -2)
    return gather_whole(group, mask, -1) if mask.shape[-1] == keys else mask


def causal_mask(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Return the boolean mask under which the last `queries` of `keys` positions attend to no later one."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
