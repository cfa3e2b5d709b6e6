"""Weights files used in place: a memory map, and a check that the file is still the same."""

import ctypes
import mmap
import os
import resource
import weakref
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accel_bigmodel.gguf.header import GgufHeader, read_gguf
from accel_core.checkpoint.manifest import open_member
from accel_core.checkpoint.tensor_file import Header, StoredTensor, check_booleans, read_header
from accel_core.errors import CheckpointError, CheckpointNotFoundError, OffloadError

# Without it, a private map of a file larger than the RAM is refused by the kernel's overcommit rule.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_READ_AHEAD = 128 * 1024
_FAILED = ctypes.c_void_p(-1).value
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p  # as an int, ctypes would cut the address
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _identity(found: os.stat_result) -> tuple[int, ...]:
    """Return what tells a file from another one, and from what it was before it was written to."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class InFile(NamedTuple):
    """Where a tensor lies that is used in place: an index's entry, its dtype there, and the weight if it is packed."""

    entry: dict[str, Any]
    dtype: torch.dtype
    weight: torch.Tensor | None = None


def header_of(path: str | os.PathLike[str]) -> Header | GgufHeader:
    """Read the header of a safetensors or GGUF file, and nothing else.

    Raises:
        CheckpointNotFoundError: When the file does not exist.
        UnsafeCheckpointError: When it is not a regular file.
        CheckpointDamagedError: When it is truncated or not in the format.
    """
    descriptor = _open(path)
    try:
        return _read(descriptor, path)
    finally:
        os.close(descriptor)


def _read(descriptor: int, path: str | os.PathLike[str]) -> Header | GgufHeader:
    return read_gguf(descriptor, path) if os.fspath(path).endswith(".gguf") else read_header(descriptor, path)


def _open(path: str | os.PathLike[str]) -> int:
    """Open a regular file and return its descriptor."""
    name = os.fspath(path)
    try:
        return open_member(Path(name).parent, Path(name).name, links=True)
    except FileNotFoundError as failure:
        raise CheckpointNotFoundError(
            f"A checkpoint file is missing; got {name!r}. Check the path, or fetch the file again."
        ) from failure
    except OSError as failure:
        raise CheckpointError(
            f"A checkpoint file cannot be read; got {failure.strerror} for {name!r}. Allow this user to read it."
        ) from failure


class Map:
    """The bytes of a file as private memory, released when neither this nor a tensor made of `buffer` uses them."""

    def __init__(self, descriptor: int, size: int, first: int = 0) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        # Python's own `mmap` keeps the file open (before 3.13): a model with a thousand weight files would use up the
        # files that a process may open.
        address = _LIBC.mmap(None, size, access, mmap.MAP_PRIVATE | _NORESERVE, descriptor, first)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.buffer = (ctypes.c_char * size).from_address(address)
        self._address = address
        # Not at exit: threads and other exit handlers may still compute with the weights.
        weakref.finalize(self.buffer, _LIBC.munmap, address, size).atexit = False

    def advise(self, advice: int, first: int, last: int) -> None:
        """Advise the kernel how bytes will be used; the first one begins a page."""
        _LIBC.madvise(self._address + first, last - first, advice)


def _leaves_room(size: int) -> bool:
    """Return whether half of the address space stays free when so many bytes of it are used for a map."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return True
    pages = Path("/proc/self/statm")
    used = int(pages.read_text(encoding="ascii").split()[0]) * mmap.PAGESIZE if pages.exists() else 0
    return 2 * (used + size) <= limit


class MappedFile:
    """A file mapped into memory, private to this process: its tensors are views, read when they are touched.

    Where the process may not use enough address space for the whole file, each tensor is mapped while it is in use.
    """

    def __init__(self, path: str | os.PathLike[str], entries: Mapping[str, StoredTensor] | None = None) -> None:
        self.path = os.fspath(path)
        with open(_open(path), "rb") as file:
            self.header = _read(file.fileno(), self.path) if entries is None else None
            self.entries = (entries or {}) if self.header is None else self.header.tensors
            self._stamp = os.fstat(file.fileno())
            self.size = self._stamp.st_size
            mapped = self.size and _leaves_room(self.size)
            self._map = Map(file.fileno(), self.size) if mapped else None
        self._held: dict[str, torch.Tensor] = {}
        self._views: MutableMapping[str, torch.Tensor] = weakref.WeakValueDictionary() if self._map is None else {}

    def __contains__(self, name: object) -> bool:
        """Return whether the file holds a tensor."""
        return name in self.entries

    def check(self) -> None:
        """Check that the mapped file is unchanged: it has the same size and modification time."""
        try:
            found = os.stat(self.path)
        except OSError:
            return
        # A file that was deleted, or that another one took the place of, stays mapped as it was: saving a model into
        # the folder that it is read from leaves it as it is. A file that was overwritten in place, and whose time of
        # change was then put back, passes: only checksums would tell, and reading all weights for one is what a map
        # avoids.
        is_replaced = (found.st_dev, found.st_ino) != (self._stamp.st_dev, self._stamp.st_ino)
        if is_replaced or (found.st_size, found.st_mtime_ns) == (self._stamp.st_size, self._stamp.st_mtime_ns):
            return
        raise self._changed(f"{found.st_size} bytes where {self.size} were mapped")

    @property
    def stamp(self) -> list[int]:
        """What tells the file from another one that takes its place."""
        return [self._stamp.st_size, self._stamp.st_mtime_ns]

    def check_stamp(self, stamp: list[int] | None) -> None:
        """Check that the file is the one that had a stamp."""
        if stamp is not None and stamp != self.stamp:
            raise self._changed("another content")

    def _changed(self, what: str) -> OffloadError:
        return OffloadError(
            f"A file that holds offloaded weights changed after the model was dispatched; got {self.path!r} with "
            f"{what}. Load and dispatch the model again."
        )

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as a view of the map.

        Raises:
            KeyError: When the file does not hold the tensor.
            CheckpointDamagedError: When its booleans are neither 0 nor 1.
            CheckpointError: When torch has no such dtype.
        """
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = self._view(self.entries[name])
        return view

    def row(self, name: str, number: int) -> torch.Tensor:
        """Return one row of a tensor, with the tensor's number of sizes, as a view of the map."""
        entry = self.entries[name]
        if self.is_mapped(name):
            return self.tensor(name)[number : number + 1]
        size = entry.nbytes // entry.shape[0]
        return self._view(StoredTensor(entry.form, (1, *entry.shape[1:]), entry.start + number * size, size))

    def hold(self, name: str) -> None:
        """Keep a tensor mapped: what knows it by its address would take another one for it."""
        self._held[name] = self.tensor(name)

    def is_mapped(self, name: str) -> bool:
        """Return whether a tensor has an address."""
        return self._map is not None or name in self._views

    def writes(self, name: str) -> int:
        """Return how often a tensor's view was written to, which the file does not have."""
        view = self._views.get(name)
        # Inference tensors have no count of writes: asking for it raises.
        return 0 if view is None or view.is_inference() else view._version

    def _mapped(self, first: int, last: int) -> tuple[Any, int]:
        """Return mapped memory, and where bytes of the file begin in it."""
        if self._map is not None:
            return self._map.buffer, first
        begin = first - first % mmap.PAGESIZE
        with open(_open(self.path), "rb") as file:
            found = os.fstat(file.fileno())
            if _identity(found) != _identity(self._stamp):
                raise self._changed("another content")
            return Map(file.fileno(), last - begin, begin).buffer, first - begin

    def _view(self, entry: StoredTensor) -> torch.Tensor:
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        buffer, offset = self._mapped(entry.start, entry.stop)
        raw = torch.frombuffer(buffer, dtype=torch.uint8, count=entry.nbytes, offset=offset)
        if entry.start % entry.dtype.itemsize:
            raw = raw.clone()  # a misaligned tensor cannot be viewed in its dtype
        view = raw.view(entry.dtype).view(entry.shape)
        check_booleans(view, self.path)
        view.__dict__["is_piece"] = self._map is None
        return view

    def will_need(self, name: str, row: int | None = None) -> None:
        """Ask the kernel to read the pages of a tensor, or of one of its rows, ahead."""
        self._advise(mmap.MADV_WILLNEED, self.entries[name], row)

    def done_with(self, name: str, row: int | None = None) -> None:
        """Release the pages of a tensor, or of one of its rows; touching it again reads the file again."""
        self._advise(mmap.MADV_DONTNEED, self.entries[name], row)

    def _advise(self, advice: int, entry: StoredTensor, row: int | None) -> None:
        if entry.nbytes == 0:
            return
        first, last = entry.start, entry.stop
        if row is not None:
            size = entry.nbytes // entry.shape[0]
            first, last = first + row * size, first + (row + 1) * size
        if self._map is None:  # a piece is read when it is touched, and goes with its view
            return
        if advice == mmap.MADV_DONTNEED:
            # Whole pages of this tensor alone: a neighbor may have been written to, in memory.
            first = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
            last -= last % mmap.PAGESIZE
            if last > first:
                self._map.advise(advice, first, last)
            return
        # From where `madvise` wants a range to begin, in steps: of a longer one Linux reads no more ahead.
        for begin in range(first - first % mmap.PAGESIZE, last, _READ_AHEAD):
            self._map.advise(advice, begin, min(begin + _READ_AHEAD, last))
