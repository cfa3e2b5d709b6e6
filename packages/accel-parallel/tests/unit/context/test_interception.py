"""What torch finds inside of a context block."""

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from accel_parallel.context.attention import Attention, AttentionCall, sdpa
from accel_parallel.context.interception import attending
from accel_parallel.context.order import Share


class LastQueries(Attention):
    """Attends with the last half of the queries, under the bias that accelerators have kernels for."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return what the last queries find."""
        queries = call.query[..., 4:, :]
        return sdpa(queries, call.key, call.value, attn_mask=causal_lower_right(4, 8))


@pytest.mark.filterwarnings("ignore:(Flash|Memory|Expected|CuDNN|Both|All)")  # why no kernel of a GPU is used here
def test_a_causal_bias_is_read_as_one() -> None:
    """Attention over all ranks may use torch's own bias, which torch tells by the name of its function."""
    group: Any = None
    query, key, value = torch.randn(3, 2, 2, 8, 16).unbind()
    with attending(LastQueries(group, Share(8, 0, 1))):
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    whole = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(found, whole[..., 4:, :])
