"""What DeepSpeed adds to Accelerate's surface works without the engine, where it needs none."""

import torch
from torch import nn

from accelerate.utils import compile_regions_deepspeed


def test_blocks_are_compiled_where_they_stand() -> None:
    """Each repeated block is compiled, the model stays the same object, and one without blocks is compiled whole."""
    blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    model = nn.Sequential(nn.Linear(4, 4), blocks)
    assert compile_regions_deepspeed(model, backend="eager") is None
    assert all(block._compiled_call_impl is not None for block in blocks)
    assert model._compiled_call_impl is None
    rows = torch.ones(2, 4)
    torch.testing.assert_close(blocks[0](rows), nn.functional.linear(rows, blocks[0].weight, blocks[0].bias))
    alone = nn.Linear(4, 4)
    compile_regions_deepspeed(alone, backend="eager")
    assert alone._compiled_call_impl is not None
