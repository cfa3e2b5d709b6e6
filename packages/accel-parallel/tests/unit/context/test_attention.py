"""Attention over a shared sequence, with the masks that accelerators get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from accel_parallel.context.attention import AttentionCall, GatheredAttention
from accel_parallel.context.interception import attending
from accel_parallel.context.order import Share


class OnAccelerator(GatheredAttention):
    """Attends as on an accelerator, to keys that are there already."""

    def __init__(self, share: Share, keys: torch.Tensor) -> None:
        nobody: Any = None
        super().__init__(nobody, share)
        self.keys = keys

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attend with this rank's queries to all keys."""
        rest = {"dropout_p": 0.0, "scale": call.scale, "enable_gqa": call.enable_gqa}
        return self._attend_causally(call.query, self.keys, self.keys, rest)

    def _causal_mask(self, queries: int, keys: int, device: torch.device) -> torch.Tensor:
        return super()._causal_mask(queries, keys, torch.device("cuda"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("heads", [2, 3])
def test_the_causal_bias_of_accelerators_gives_causal_attention(rank: int, heads: int) -> None:
    """Each rank's queries get what one process computes, and the function is exchanged again afterwards."""
    torch.manual_seed(0)
    whole, share = torch.randn(1, heads, 16, 8), Share(16, rank, 2)
    own = share.of(whole, -2)
    with attending(OnAccelerator(share, whole)):
        exchanged = F.scaled_dot_product_attention
        found = F.scaled_dot_product_attention(own, own, own, is_causal=True)
        assert F.scaled_dot_product_attention is exchanged
    expected = F.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
    torch.testing.assert_close(found, share.of(expected, -2))
