"""Whether ranks hold the same values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import nn


def fingerprint(model: nn.Module) -> str:
    """Return what is equal on ranks whose models have the same parameters and buffers, and hardly ever otherwise."""
    return fingerprint_of(tensor for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


@torch.no_grad()
def fingerprint_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return what is equal on ranks that have the same tensors, and hardly ever otherwise."""
    # Bits are added up as integers where a tensor lies, without a copy; a permutation goes unnoticed.
    sums = [_sum(tensor) for tensor in tensors]
    return hashlib.sha256(repr([int(each) for each in sums]).encode()).hexdigest()


def _sum(tensor: torch.Tensor) -> torch.Tensor | int:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided or not tensor.numel():
        return 0
    content = tensor.detach().contiguous().flatten().view(torch.uint8)
    whole = content.numel() // 8 * 8
    words = content[:whole]
    # Words are read where a word begins; a part of a file that is mapped to memory may begin elsewhere.
    words = words if words.storage_offset() % 8 == 0 and words.data_ptr() % 8 == 0 else words.clone()
    return words.view(torch.int64).sum() + content[whole:].sum(dtype=torch.int64)
