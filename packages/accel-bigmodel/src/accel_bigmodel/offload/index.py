"""Safetensors files used in place: header, memory map, and a check that the file is still the same one.

Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import mmap
import os
import stat
import struct
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from accel_core.errors import CheckpointDamagedError, CheckpointNotFoundError, OffloadError, UnsafeCheckpointError

__all__ = ["MappedFile", "TensorEntry", "header_of", "map_file"]

# Names of the format's header.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
_LARGEST_HEADER = 100_000_000  # the format's own bound
# Without it, a private map of a file larger than the RAM is refused by the kernel's overcommit rule.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file.

    Attributes:
        dtype: Its dtype in the file.
        shape: Its shape.
        start: Offset of its first byte in the file.
        stop: Offset after its last byte.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.stop - self.start


def header_of(path: str | os.PathLike[str]) -> dict[str, TensorEntry]:
    """Read what tensors a safetensors file holds, and nothing else of it.

    Args:
        path: The file; links are followed.

    Returns:
        The entries by tensor name, in the file's order.

    Raises:
        CheckpointNotFoundError: When there is no such file.
        UnsafeCheckpointError: When it is no regular file.
        CheckpointDamagedError: When it is truncated or not in the format.
    """
    with open(_regular(path), "rb") as file:
        return _read_header(file, os.fspath(path))[0]


def _regular(path: str | os.PathLike[str]) -> str:
    path = os.fspath(path)
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"A checkpoint file is missing. Looked for {path!r}. Check the path, or fetch the file again."
        ) from None
    if not stat.S_ISREG(mode):
        raise UnsafeCheckpointError(
            f"A checkpoint must be a regular file. Found {path!r}, which is a "
            f"{'folder' if stat.S_ISDIR(mode) else 'device, pipe or socket'}. Name the file itself."
        )
    return path


def _read_header(file: Any, path: str) -> tuple[dict[str, TensorEntry], int]:
    """Read and check the header; returns the entries and the file's size."""
    size = os.fstat(file.fileno()).st_size

    def damaged(found: str) -> CheckpointDamagedError:
        return CheckpointDamagedError(
            f"{path!r} is not a whole safetensors file. Found {found}. Fetch or save the file again."
        )

    prefix = file.read(8)
    if len(prefix) < 8:
        raise damaged(f"{size} bytes, fewer than the format's first field")
    (length,) = struct.unpack("<Q", prefix)
    if length > _LARGEST_HEADER or 8 + length > size:
        raise damaged(f"a header of {length} bytes announced in a file of {size} bytes")
    try:
        header = json.loads(file.read(length))
        entries = {
            name: TensorEntry(
                DTYPES[entry["dtype"]],
                tuple(int(extent) for extent in entry["shape"]),
                8 + length + int(entry["data_offsets"][0]),
                8 + length + int(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as failure:
        raise damaged(f"a header that cannot be read ({type(failure).__name__}: {failure})") from failure
    for name, entry in entries.items():
        if entry.nbytes != math.prod(entry.shape) * entry.dtype.itemsize or entry.start < 8 + length:
            raise damaged(f"tensor {name!r} of shape {entry.shape} and {entry.dtype} in {entry.nbytes} bytes")
        if entry.stop > size:
            raise damaged(f"tensor {name!r} ending at byte {entry.stop} of a file of {size} bytes")
    return entries, size


class MappedFile:
    """A file mapped into memory, private to this process: its tensors are views, read when they are touched.

    Args:
        path: The file; links are followed.
        entries: What it holds; by default its safetensors header is read.
    """

    def __init__(self, path: str | os.PathLike[str], entries: dict[str, TensorEntry] | None = None) -> None:
        self.path = _regular(path)
        with open(self.path, "rb") as file:
            self.entries = _read_header(file, self.path)[0] if entries is None else entries
            found = os.fstat(file.fileno())
            self.size = found.st_size
            self._stamp = (found.st_size, found.st_mtime_ns, found.st_ino)
            self._map: mmap.mmap | None = None
            if self.size:
                self._map = mmap.mmap(
                    file.fileno(), self.size, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
        self._views: dict[str, torch.Tensor] = {}

    def __contains__(self, name: object) -> bool:
        """Tell whether the file holds a tensor."""
        return name in self.entries

    def check(self) -> None:
        """Make sure that the file is the one that was mapped.

        Raises:
            OffloadError: When its size or its time of change differs, or it is gone.
        """
        try:
            found = os.stat(self.path)
        except OSError as failure:
            raise OffloadError(
                f"A file that holds offloaded weights cannot be read any more. Found {failure}. Keep the files of a "
                "dispatched model in place, or dispatch it again."
            ) from failure
        if (found.st_size, found.st_mtime_ns, found.st_ino) != self._stamp:
            raise OffloadError(
                f"A file that holds offloaded weights changed after the model was dispatched. Found {self.path!r} with "
                f"{found.st_size} bytes where {self.size} were mapped. Load and dispatch the model again."
            )

    def tensor(self, name: str) -> torch.Tensor:
        """Give a tensor as a view of the map.

        Args:
            name: The tensor's name in the file.

        Returns:
            The tensor; writing to it never reaches the file.

        Raises:
            KeyError: When the file holds no such tensor.
        """
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = self._view(self.entries[name])
        return view

    def _view(self, entry: TensorEntry) -> torch.Tensor:
        if entry.nbytes == 0 or self._map is None:
            return torch.empty(entry.shape, dtype=entry.dtype)
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.nbytes, offset=entry.start)
        if entry.start % entry.dtype.itemsize:
            raw = raw.clone()  # a misaligned tensor cannot be viewed in its dtype
        return raw.view(entry.dtype).view(entry.shape)

    def will_need(self, name: str) -> None:
        """Ask the kernel to read a tensor's pages ahead.

        Args:
            name: The tensor's name in the file.
        """
        self._advise(mmap.MADV_WILLNEED, self.entries[name])

    def done_with(self, name: str) -> None:
        """Give a tensor's pages back; touching it again reads the file again.

        Args:
            name: The tensor's name in the file.
        """
        self._advise(mmap.MADV_DONTNEED, self.entries[name])

    def _advise(self, advice: int, entry: TensorEntry) -> None:
        if self._map is None or entry.nbytes == 0:
            return
        first, last = entry.start, entry.stop
        if advice == mmap.MADV_DONTNEED:
            # Whole pages of this tensor alone: a neighbour may have been written to, in memory.
            first = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
            last -= last % mmap.PAGESIZE
        else:
            first -= first % mmap.PAGESIZE
        if last > first:
            self._map.madvise(advice, first, last - first)


_mapped: "weakref.WeakValueDictionary[tuple[str, int, int, int], MappedFile]" = weakref.WeakValueDictionary()
_lock = threading.Lock()


def map_file(path: str | os.PathLike[str]) -> MappedFile:
    """Map a safetensors file, or give the map that this process already has of it.

    Args:
        path: The file; links are followed.

    Returns:
        The map.

    Raises:
        CheckpointError: As `header_of` does.
    """
    found = os.stat(_regular(path))
    key = (os.path.realpath(path), found.st_size, found.st_mtime_ns, found.st_ino)
    with _lock:
        file = _mapped.get(key)
        if file is None:
            file = _mapped[key] = MappedFile(path)
        return file
