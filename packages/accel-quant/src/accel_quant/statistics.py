"""Compares the statistics of packed weights with what the weights need.

bitsandbytes trusts them: with too few scales its kernels read memory that belongs to something else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accel_core.errors import CheckpointDamagedError

_STATE = "weight.quant_state.bitsandbytes__"
_CODES, _NESTED_CODES = 16, 256
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_STORAGES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
_DTYPES = ("float16", "bfloat16", "float32")
_LONGEST_STATE = 10_000
_WORDS = {"quant_type", "blocksize", "dtype", "shape"}
_NESTED_WORDS = {"nested_blocksize", "nested_dtype", "nested_offset"}


def check_statistics(stored: Mapping[str, torch.Tensor], shape: Sequence[int] | None) -> None:
    """Check that packed weights and their statistics fit together."""
    if wrong := faults(stored, shape):
        raise CheckpointDamagedError(
            f"The statistics of a packed weight do not fit it; got {'; '.join(wrong)}. Fetch or save the weights again."
        )


def faults(stored: Mapping[str, torch.Tensor], shape: Sequence[int] | None) -> list[str]:
    """Compare packed weights with their statistics."""
    wrong: list[str] = []
    expected: dict[str, tuple[Sequence[int], torch.dtype]] = {}
    if "SCB" in stored:
        whole = stored[""].shape if shape is None else shape
        expected = {"": (whole, torch.int8), "SCB": (whole[:1], torch.float32)}
    elif (key := next((key for key in stored if key.startswith(_STATE)), None)) is not None:
        nested = "weight.nested_absmax" in stored
        state = _read_state(stored[key])
        wrong = _faults_of_state(state, key.removeprefix(_STATE), shape, nested)
        if not wrong:
            expected = _parts_of_four_bits(state, stored[""].dtype, nested)
    for suffix, (size, dtype) in expected.items():
        part = stored[suffix]
        if tuple(part.shape) != tuple(size) or part.dtype != dtype or not part.is_contiguous():
            wrong.append(
                f"{suffix or 'the weight'} of {_described(part.shape, part.dtype)} for {_described(size, dtype)}"
            )
    return wrong


def _described(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"shape {tuple(shape)} and {dtype}"


def _read_state(part: torch.Tensor) -> dict[str, Any]:
    """Return what bitsandbytes wrote as JSON beside a weight; an empty dict if it is something else."""
    if part.dtype != torch.uint8 or part.dim() != 1 or part.numel() > _LONGEST_STATE:
        return {}
    try:
        state = json.loads(bytes(part.tolist()))
    except (RecursionError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _faults_of_state(state: Mapping[str, Any], kind: str, shape: Sequence[int] | None, nested: bool) -> list[str]:
    # An extra key could overwrite a tensor, because bitsandbytes puts all of them into one dictionary.
    words = _WORDS | (_NESTED_WORDS if nested else set())
    if set(state) != words:
        return [f"a quant_state with {sorted(state)} for {sorted(words)}"]
    size = state["shape"]
    whole = isinstance(size, list) and all(type(length) is int and length >= 0 for length in size)
    fits = {
        "quant_type": state["quant_type"] == kind,
        "blocksize": type(state["blocksize"]) is int and state["blocksize"] in _BLOCKS,
        "dtype": isinstance(state["dtype"], str) and state["dtype"] in _DTYPES,
        "shape": whole and (shape is None or size == list(shape)),
        "nested_blocksize": not nested
        or (type(state["nested_blocksize"]) is int and state["nested_blocksize"] in _BLOCKS),
        "nested_dtype": not nested or state["nested_dtype"] == "float32",
        "nested_offset": not nested or type(state["nested_offset"]) is float,
    }
    return [f"{word} {state[word]!r:.60} in its quant_state" for word, right in fits.items() if not right]


def _parts_of_four_bits(
    state: Mapping[str, Any], storage: torch.dtype, nested: bool
) -> dict[str, tuple[Sequence[int], torch.dtype]]:
    """Return the shapes and dtypes that the parts of a weight of 4 bits have."""
    storage = storage if storage in _STORAGES else torch.uint8
    count = torch.Size(state["shape"]).numel()
    blocks = -(-count // state["blocksize"])
    expected: dict[str, tuple[Sequence[int], torch.dtype]] = {
        "": ((-(-count // (2 * storage.itemsize)), 1), storage),
        "weight.absmax": ((blocks,), torch.uint8 if nested else torch.float32),
        "weight.quant_map": ((_CODES,), torch.float32),
    }
    if nested:
        expected["weight.nested_absmax"] = ((-(-blocks // state["nested_blocksize"]),), torch.float32)
        expected["weight.nested_quant_map"] = ((_NESTED_CODES,), torch.float32)
    return expected
