"""Tensors that hold a rank's part of the sequence inside a block, and the whole of it outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from accel_core.errors import ConfigurationError
from accel_core.strategies.parts import SequenceBuffers
from accel_parallel.context.order import Share


def check_buffers(given: SequenceBuffers, rank: int, size: int) -> Share:
    """Return how the sequence that some buffers share is split; refuse buffers that have none in common.

    Raises:
        ConfigurationError: There is none; one is not a tensor, or is trained; a dim is missing or out of range; lengths
            differ or cannot be shared.
    """
    buffers, dims, _ = given
    if not buffers or len(buffers) != len(dims):
        raise ConfigurationError(
            f"Every buffer has its sequence dim, and context parallel splits at least one; got {len(buffers)} buffers "
            f"and {len(dims)} dims. Pass buffers=[input_ids, ...] and buffer_seq_dims=[1, ...]."
        )
    lengths: set[int] = set()
    for place, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        # Memory is exchanged in place, unseen by autograd.
        if not isinstance(buffer, torch.Tensor) or buffer.requires_grad:
            got = f"a {type(buffer).__name__}" + (" that requires a gradient" * isinstance(buffer, torch.Tensor))
            raise ConfigurationError(
                f"Context parallel splits data in place; got {got} as buffer {place}. "
                "Pass tensors of data, such as input_ids; split a trained tensor in the model."
            )
        if not -buffer.dim() <= dim < buffer.dim():
            raise ConfigurationError(
                f"A sequence dim is one of its buffer's; got dim {dim} for buffer {place} of shape "
                f"{tuple(buffer.shape)}. Change buffer_seq_dims."
            )
        lengths.add(buffer.shape[dim])
    if len(lengths) > 1:
        raise ConfigurationError(
            f"All buffers hold the same sequence; got the lengths {sorted(lengths)}. "
            "Pass in buffer_seq_dims the dim of each along which its tokens lie, and cut what is longer."
        )
    share = Share(lengths.pop(), rank, size)
    share.check()
    return share


@contextmanager
def split_in_place(given: SequenceBuffers, share: Share) -> Iterator[None]:
    """Let buffers hold this rank's part of the sequence in the block, and put back afterwards what they held."""
    # Other memory for that time: views of one tensor (inputs and labels of one batch) do not overwrite one another.
    kept = {id(buffer) for buffer in given.stay_split}
    # One that is listed twice is split once.
    by_identity = {id(buffer): (buffer, dim) for buffer, dim in zip(given.buffers, given.dims, strict=True)}
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        parts = {key: share.of(buffer, dim) for key, (buffer, dim) in by_identity.items()}
    try:
        for key, (buffer, _) in by_identity.items():
            if key not in kept:
                before.append((buffer, buffer.detach()))  # the same memory, to be put back
            _hold(buffer, parts.pop(key))  # popped, so that only the buffer keeps it alive
        yield
    finally:
        for buffer, whole in before:
            _hold(buffer, whole)


def _hold(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Let a tensor stand for the memory of another."""
    with torch.no_grad():
        buffer.set_(value)  # type: ignore[call-overload]
