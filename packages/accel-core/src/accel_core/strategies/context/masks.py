"""Masks of attention, as a rank needs them: its own queries against the keys of the whole sequence."""

from __future__ import annotations

import torch
import torch.distributed as dist

from accel_core.strategies.context.exchange import gather_whole
from accel_core.strategies.context.order import Share

__all__ = ["causal_mask", "lacks_keys", "own_rows"]


def lacks_keys(mask: torch.Tensor, keys: int) -> bool:
    """Return whether a mask says nothing of keys that other ranks have, and differs between queries.

    Args:
        mask: A mask of attention; its last two dims are queries and keys.
        keys: Number of this rank's keys.
    """
    return mask.dim() > 1 and mask.shape[-1] == keys and mask.shape[-2] > 1


def own_rows(mask: torch.Tensor, queries: int, keys: int, share: Share, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a mask of this rank's queries against all keys.

    Args:
        mask: One of all keys, for this rank's queries, for all, or for any; or one of this rank's keys for any query
            (padding that was split like the tokens), which is gathered.
        queries: Number of this rank's queries.
        keys: Number of this rank's keys.
        share: This rank's part of the sequence.
        group: The ranks that share it.
    """
    if mask.dim() > 1 and mask.shape[-2] == queries * share.size:
        mask = Share(mask.shape[-2], share.rank, share.size).of(mask, -2)
    return gather_whole(group, mask, -1) if mask.shape[-1] == keys else mask


def causal_mask(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Return the boolean mask under which the last `queries` of `keys` positions attend to no later one.

    Args:
        queries: Number of queries, at most `keys`.
        keys: Number of keys.
        device: Where the mask is made.
    """
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
