"""The three kinds of files in a checkpoint: tensors, plain objects, JSON. Nothing in them is ever executed."""

from __future__ import annotations

from accel_core.checkpoint.json_file import read_json, write_json
from accel_core.checkpoint.pickles import TORCH_SAFE_GLOBALS, prove_readable, read_object, safe_globals, write_object
from accel_core.checkpoint.tensor_file import TensorFile, buffer_of, storage_key, stream_tensors, write_tensors
from accel_core.checkpoint.tensor_header import DTYPES, StoredTensor

__all__ = [
    "DTYPES",
    "TORCH_SAFE_GLOBALS",
    "StoredTensor",
    "TensorFile",
    "buffer_of",
    "prove_readable",
    "read_json",
    "read_object",
    "safe_globals",
    "storage_key",
    "stream_tensors",
    "write_json",
    "write_object",
    "write_tensors",
]
