"""Tensors that are split in place."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from accel_core.data.labels import shift_labels
from accel_core.errors import ConfigurationError
from accel_core.strategies.parts import SequenceBuffers
from accel_parallel.context.buffers import check_buffers, split_in_place
from accel_parallel.context.order import Share, in_order


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_share_a_sequence_evenly_under_a_causal_mask(size: int) -> None:
    """All positions occur once, each rank has as many keys before its tokens as others, and parts make the whole."""
    whole = torch.arange(24 * 2).view(2, 24)
    parts = [Share(24, rank, size).of(whole, 1) for rank in range(size)]
    assert len({int(part[0].sum()) for part in parts}) == 1
    assert {part.shape for part in parts} == {(2, 24 // size)}
    torch.testing.assert_close(in_order(parts, 1), whole)


@pytest.mark.parametrize(
    ("buffers", "dims", "kept", "words"),
    [
        ([], [], [], "got 0 buffers and 0 dims"),
        ([torch.zeros(2, 8)], [], [], "got 1 buffers and 0 dims"),
        (["text"], [1], [], "got a str as buffer 0"),
        ([torch.zeros(2, 8, requires_grad=True)], [1], [], "got a Tensor that requires a gradient as buffer 0"),
        ([torch.zeros(8)], [1], [], "got dim 1 for buffer 0 of shape (8,)"),
        ([torch.zeros(8), torch.zeros(2, 12)], [0, 1], [], "got the lengths [8, 12]"),
        ([torch.zeros(2, 6)], [-1], [], "divisible by 4 (a head and a tail piece for each); got a length of 6"),
        ([torch.zeros(2, 0)], [1], [], "got a length of 0"),
    ],
)
def test_buffers_that_have_no_sequence_in_common_are_refused(buffers: Any, dims: Any, kept: Any, words: str) -> None:
    """Each error says what was got."""
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        check_buffers(SequenceBuffers(buffers, dims, kept), 0, 2)


def test_a_buffer_that_is_given_twice_is_split_once() -> None:
    """The same tensor in two places holds its part in the block, and the whole afterwards."""
    buffer = torch.arange(8)
    with split_in_place(SequenceBuffers([buffer, buffer], [0, 0]), Share(8, 1, 2)):
        assert buffer.tolist() == [2, 3, 4, 5]
    assert buffer.tolist() == list(range(8))


def test_labels_are_shifted_over_the_borders_of_parts() -> None:
    """Each token has the one that follows it in the whole sequence, and the last one none."""
    tokens = torch.arange(16).view(2, 8)
    shifted = shift_labels(tokens, ignore_index=-1)
    assert shifted.tolist() == [[1, 2, 3, 4, 5, 6, 7, -1], [9, 10, 11, 12, 13, 14, 15, -1]]
    assert Share(8, 0, 2).of(shifted, 1).tolist() == [[1, 2, 7, -1], [9, 10, 15, -1]]
