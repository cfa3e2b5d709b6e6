"""Labels of a language model whose sequence is split."""

from __future__ import annotations

import torch


def shift_labels(labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Return for each token the one that follows it, as a language model has to predict it.

    Shift before the sequence is split: the token that follows the last one of a rank's part is on another rank. A
    model that shifts on its own (transformers does, without `shift_labels`) takes a wrong one there.

    >>> shift_labels(torch.tensor([[5, 6, 7]]))
    tensor([[   6,    7, -100]])
    """
    end = labels.new_full((*labels.shape[:-1], 1), ignore_index)
    return torch.cat([labels[..., 1:], end], -1)
