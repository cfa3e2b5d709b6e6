"""Activation checkpointing: blocks that keep their inputs and compute the rest again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from accel_core.errors import StateError


def recompute(blocks: Iterable[nn.Module], *, offload: bool) -> None:
    """Let blocks keep nothing but their inputs for the backward pass; names and classes stay as they are."""
    # Not by torch's wrapper, which gives blocks other classes and names.
    for block in blocks:
        block.forward = _recomputed(block.forward, offload)


def _recomputed(forward: Callable[..., Any], offload: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        kwargs = {name: _no_cache(value) for name, value in kwargs.items()}
        with save_on_cpu(pin_memory=torch.accelerator.is_available()) if offload else nullcontext():
            # Random numbers are drawn again, so dropout is the same in both passes.
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)

    return recomputed


def _no_cache(value: Any) -> Any:
    """Return None in place of an empty cache of keys and values, which the backward pass would fill once more."""
    if not hasattr(value, "get_seq_length"):
        return value
    if value.get_seq_length() > 0:
        raise StateError(
            "A block that is computed again in the backward pass would add to a cache of keys and values twice; got "
            f"one with {value.get_seq_length()} tokens. Call the model without it, or without activation_checkpointing."
        )
    return None
