"""Weights in the safetensors format: each tensor read straight into memory when it is asked for.

Written here and not by the `safetensors` package, which takes all tensors at once and gives no digest of what it wrote.
"""

from __future__ import annotations

import json
import math
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accel_core._records import record
from accel_core.checkpoint.digest import HashingFile
from accel_core.checkpoint.manifest import Entry, damaged_file, open_member, path_of
from accel_core.comm.transport import memory_of
from accel_core.errors import CheckpointError
from accel_core.logging import get_logger
from accel_core.mesh.tensor import fill, is_spread, local_part

logger = get_logger(__name__)

_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Names of the format, and those of torch's dtypes."""

DTYPES: dict[str, torch.dtype] = {form: getattr(torch, name) for form, name in _NAMES.items() if hasattr(torch, name)}
"""Names that the safetensors format gives to dtypes, for those that this torch has."""

METADATA = "__metadata__"
"""The entry of a header that is not a tensor."""

FORMS = {dtype: name for name, dtype in DTYPES.items()}
"""The same names by dtype."""

_FORMAT = "format"


class StoredTensor(NamedTuple):
    """Where one tensor lies in a file; its form is the format's name where this torch has no such dtype."""

    form: torch.dtype | str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        if isinstance(self.form, str):
            raise CheckpointError(
                f"A weights file holds values of a dtype that is not read with torch {torch.__version__}; got "
                f"{self.form}. Convert the file, or install a torch that has the dtype."
            )
        return self.form

    @property
    def stop(self) -> int:
        """The byte after its last one."""
        return self.start + self.nbytes


class Header(NamedTuple):
    """What a safetensors file says of itself: tensors in the order in which they lie, and words of the writer."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def read_header(descriptor: int, path: str | os.PathLike[str]) -> Header:
    """Read and check the header of an open safetensors file, which may have at most 100 MB.

    The package is not told where a tensor lies, but in which order they do, and that nothing is between them.
    """
    try:
        with safe_open(path_of(descriptor, path), "pt", backend="pread") as file:
            metadata = file.metadata() or {}
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            entries = {name: (str(each.get_dtype()), tuple(each.get_shape())) for name, each in slices.items()}
    except (SafetensorError, OSError) as error:
        raise damaged_file(path, str(error)) from error
    except MemoryError as error:  # the package maps the file while it reads the header
        raise CheckpointError(
            f"The address space of this process has no room for the weights file {os.fspath(path)!r}; got {error}. "
            "Raise `ulimit -v`, or split the file into shards."
        ) from error
    start = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
    tensors: dict[str, StoredTensor] = {}
    for name, (form, shape) in entries.items():
        bits = re.match(r"[A-Z]+(\d+)", form)  # which every name says but BOOL
        count = math.prod(shape) * (int(bits[1]) if bits else 8) // 8
        if not count:
            try:
                # A tensor without elements fills no bytes, so nothing else bounds its sizes.
                torch.empty(shape, device="meta")
            except (RuntimeError, TypeError, OverflowError) as error:
                raise damaged_file(path, f"a shape of {name!r} that torch cannot hold: {list(shape)}") from error
        tensors[name] = StoredTensor(DTYPES.get(form, form), shape, start, count)
        start += count
    return Header(tensors, metadata)


@record(frozen=True)
class SpreadWeight:
    """A weight that several ranks hold together, and how each of them gets it whole.

    Every rank calls `gather`, or `gather_on_first`, which gives it to the first rank alone, for the same weights in the
    same order. `pieces` yields it in parts that lie one after the other, where it need not be whole to be written.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    gather: Callable[[], Tensor]
    pieces: Callable[[], Iterator[Tensor]] | None = None
    gather_on_first: Callable[[], Tensor] | None = None

    def __call__(self) -> Tensor:
        """Return the weight whole; every rank calls it."""
        return self.gather()


class TensorFile:
    """The tensors of a safetensors file, each read only when it is asked for; aliases are other names of them."""

    def __init__(self, folder: Path, name: str, *, links: bool = False) -> None:
        self.path = folder / name
        self._descriptor = open_member(folder, name, links=links)
        # Open as long as it may be read: another save can take its name meanwhile.
        weakref.finalize(self, os.close, self._descriptor)
        self.tensors, metadata = read_header(self._descriptor, self.path)
        self.aliases = {
            alias: stored
            for alias, stored in metadata.items()
            if alias != _FORMAT and alias not in self.tensors and stored in self.tensors
        }

    def read(self, name: str) -> Tensor:
        """Return a tensor in new memory on the CPU."""
        stored = self.tensors[self.aliases.get(name, name)]
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")  # whatever the default device is
        self._read_bytes(stored, tensor)
        return tensor

    @torch.no_grad()
    def read_into(self, name: str, destination: Tensor) -> None:
        """Copy a tensor into another of the same shape, straight into its memory where that is possible."""
        stored = self.tensors[self.aliases.get(name, name)]
        # Booleans are checked before they are in place.
        if lies_open(destination) and destination.dtype == stored.dtype != torch.bool:
            self._read_bytes(stored, destination)
        else:
            fill(destination, self.read(name))

    def _read_bytes(self, stored: StoredTensor, tensor: Tensor) -> None:
        if not stored.nbytes:
            return
        view, position = memory_of(tensor), stored.start
        while len(view):
            count = os.preadv(self._descriptor, [view], position)
            if not count:
                raise damaged_file(self.path, "one that became shorter while it was read")
            view, position = view[count:], position + count
        check_booleans(tensor, self.path)


def lies_open(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor holds its values as they are, one after the other, on the CPU."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu" and tensor.is_contiguous()
    return plain and not (tensor.is_conj() or tensor.is_neg())


def check_booleans(tensor: Tensor, path: str | os.PathLike[str]) -> None:
    """Make sure that the booleans of a file are 0 or 1: torch would count a 2 as two."""
    if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
        raise damaged_file(path, "booleans that are neither 0 nor 1")


def write_tensors(path: Path, tensors: Mapping[str, Tensor | SpreadWeight], *, rank: int = 0) -> Entry:
    """Write a safetensors file and flush it to disk.

    Tensors with the same memory and layout are stored once; their other names go into the metadata.
    """
    with HashingFile(path) as file:
        stream_tensors(file, tensors)
    return Entry(path.name, file.size, file.digest, rank)


def stream_tensors(file: HashingFile | IO[bytes], tensors: Mapping[str, Tensor | SpreadWeight]) -> None:
    """Write tensors in the safetensors format to any object with `write`."""
    stored, aliases = _distinct(tensors)
    header: dict[str, Any] = {METADATA: aliases | {_FORMAT: "pt"}}
    start = 0
    for name, tensor in in_file_order(stored):
        end = start + bytes_of(tensor)
        header[name] = {"dtype": FORMS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that values begin at a multiple of 8
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for _, value in in_file_order(stored):
        if isinstance(value, SpreadWeight) and value.pieces is not None:
            for piece in value.pieces():
                _write_values(file, piece)
                del piece  # before the next one is made
        else:
            _write_values(file, value() if isinstance(value, SpreadWeight) else value)


def _write_values(file: HashingFile | IO[bytes], tensor: Tensor) -> None:
    values = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    if values.numel() and not values.data_ptr():  # packed: copied out of it are the values
        values = torch.empty(values.shape, dtype=values.dtype, device="cpu").copy_(values)
    if values.numel():
        file.write(memory_of(values))


def in_file_order(tensors: Mapping[str, Tensor | SpreadWeight]) -> Iterator[tuple[str, Tensor | SpreadWeight]]:
    """Yield names and tensors in their order in a file, in which each starts at a multiple of its element size."""
    yield from sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))


def bytes_of(value: object) -> int:
    """Return the size of a weight in bytes; 0 for a value that is not a tensor."""
    return math.prod(value.shape) * value.dtype.itemsize if isinstance(value, Tensor | SpreadWeight) else 0


def warn_of_shared(tensors: Mapping[str, Any]) -> None:
    """Warn of names that share memory with another one, and are stored under that one alone."""
    aliases = _distinct(tensors)[1]
    if aliases:
        logger.warning(
            "Tensors that share memory are stored once; left out %s. A reader that does not tie them misses these.",
            ", ".join(f"{name!r} (as {first!r})" for name, first in aliases.items()),
        )


def storage_key(value: object) -> tuple[Any, ...]:
    """Return a key that is equal for values with the same memory and layout, and for the same object."""
    local = local_part(value) if isinstance(value, Tensor) else None
    if local is None or not local.numel() or not local.data_ptr():  # packed weights have no memory of their own
        return (id(value),)
    signs = local.is_conj(), local.is_neg()  # views that read the same memory as other values
    return (local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride(), signs)


def _distinct(tensors: Mapping[str, Tensor | SpreadWeight]) -> tuple[dict[str, Tensor | SpreadWeight], dict[str, str]]:
    """Split names into those that are stored and those that are other names for one of them."""
    seen: dict[tuple[Any, ...], str] = {}
    stored: dict[str, Tensor | SpreadWeight] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        _check_storable(name, tensor)
        first = seen.setdefault(storage_key(tensor), name)
        if first == name:
            stored[name] = tensor
        else:
            aliases[name] = first
    return stored, aliases


def _check_storable(name: str, tensor: Any) -> None:
    plain = isinstance(tensor, Tensor) and tensor.device.type != "meta" and tensor.layout == torch.strided
    fits = isinstance(tensor, SpreadWeight) or (plain and not is_spread(tensor))
    if not fits or name == METADATA or tensor.dtype not in FORMS:
        layout = f" of {tensor.dtype} and {tensor.layout} on {tensor.device}" if isinstance(tensor, Tensor) else ""
        raise CheckpointError(
            f"A safetensors file holds tensors with data only, none named {METADATA}; {name!r} is a "
            f"{type(tensor).__name__}{layout}. Save with safe_serialization=False, or give the model its weights first."
        )
