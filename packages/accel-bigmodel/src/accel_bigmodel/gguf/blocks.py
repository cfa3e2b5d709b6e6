"""How values of GGUF's packed types are computed: in float32 and in the order of the format's reference.

Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, the structures `block_*`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

_AT_ONCE = 1 << 18  # values in float32 that stay in a processor's cache
_AT_ONCE_ELSEWHERE = 1 << 26


class Kind(NamedTuple):
    """A type: how many values lie in a block of how many bytes, and what makes values of blocks."""

    values: int
    nbytes: int
    unpack: Callable[[torch.Tensor], torch.Tensor]


def _half(raw: torch.Tensor) -> torch.Tensor:
    return raw.view(torch.float16).float()


def _q8_0(raw: torch.Tensor) -> torch.Tensor:
    return _half(raw[:, :2]) * raw[:, 2:].view(torch.int8)


def _q4_0(raw: torch.Tensor) -> torch.Tensor:
    both = raw[:, 2:]
    codes = torch.cat((both & 15, both >> 4), 1).view(torch.int8) - 8
    return _half(raw[:, :2]) * codes


def _q4_k(raw: torch.Tensor) -> torch.Tensor:
    low, middle, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    # Six bits each: the first four scales and offsets have them together, of the others the upper two are with these.
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), 1)
    offsets = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), 1)
    both = raw[:, 16:].reshape(-1, 4, 1, 32)
    codes = torch.cat((both & 15, both >> 4), 2).view(-1, 8, 32)
    scaled = (_half(raw[:, :2]) * scales).unsqueeze(-1) * codes
    return scaled.sub_((_half(raw[:, 2:4]) * offsets).unsqueeze(-1))


def _q6_k(raw: torch.Tensor) -> torch.Tensor:
    low, high = raw[:, :128].reshape(-1, 2, 1, 2, 32), raw[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=raw.device).view(4, 1)
    codes = torch.cat((low & 15, low >> 4), 2).view(-1, 2, 4, 32) | (((high >> shifts) & 3) << 4)
    scales = _half(raw[:, 208:210]) * raw[:, 192:208].view(torch.int8)
    return scales.unsqueeze(-1) * (codes.view(torch.int8) - 32).view(-1, 16, 16)


KINDS = {
    "F32": Kind(1, 4, lambda raw: raw.view(torch.float32)),
    "F16": Kind(1, 2, lambda raw: raw.view(torch.float16)),
    "BF16": Kind(1, 2, lambda raw: raw.view(torch.bfloat16)),
    "Q8_0": Kind(32, 34, _q8_0),
    "Q4_0": Kind(32, 18, _q4_0),
    "Q4_K": Kind(256, 144, _q4_k),
    "Q6_K": Kind(256, 210, _q6_k),
}
"""The types whose values can be computed, by the format's names."""


def unpack(raw: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Compute the values of packed rows, each block in float32, then cast."""
    values, nbytes, function = KINDS[kind]
    blocks = raw.reshape(-1, nbytes)
    made = torch.empty((len(blocks), values), dtype=dtype, device=raw.device)
    step = (_AT_ONCE if raw.device.type == "cpu" else _AT_ONCE_ELSEWHERE) // values
    for first in range(0, len(blocks), step):
        part = function(blocks[first : first + step])
        made[first : first + step] = part.view(len(part), values)
    return made.view(*raw.shape[:-1], raw.shape[-1] // nbytes * values)
