"""Writing and reading bytes with their checksum (xxh3, 128 bits)."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import xxhash

from accel_core.tqdm import moved

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

CHUNK = 4 << 20
"""Bytes that are read or written at a time."""

_WRITEBACK = 8 << 20


class HashingFile:
    """A new file that computes the checksum of what is written to it and is flushed to disk when its block ends.

    It has the part of the file interface that `torch.save` needs. The file must not exist.
    """

    def __init__(self, path: Path) -> None:
        self.size = 0
        self._begun = 0
        self._state = xxhash.xxh3_128()
        self._failure: OSError | None = None
        self._file = open(path, "xb", buffering=0, opener=partial(os.open, mode=0o666))  # noqa: SIM115

    @property
    def digest(self) -> str:
        """Checksum of what was written so far, in hexadecimal digits."""
        return self._state.hexdigest()

    def write(self, data: ReadableBuffer) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK):
            part = view[start : start + CHUNK]
            self._state.update(part)
            moved(len(part))
            try:
                while len(part):
                    part = part[os.write(self._file.fileno(), part) :]  # a write may take only a part of it
            except OSError as failure:
                self._failure = failure
                raise
        self.size += len(view)
        if self.size - self._begun >= _WRITEBACK:
            # Let the disk begin to write now, so that the flush at the end has less left to wait for. Linux does that
            # for pages that nobody will need, and keeps them until they are written.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file.fileno(), self._begun, self.size - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = self.size
        return len(view)

    def flush(self) -> None:
        """Do nothing: writes are not buffered; `__exit__` flushes to disk."""

    def __enter__(self) -> HashingFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error is None:
                os.fsync(self._file.fileno())
        if error and self._failure and self._failure is not error:
            raise self._failure from error  # torch.save says of a full disk only that its writer failed


def digest_of_bytes(data: bytes) -> str:
    """Return the XXH3 checksum of bytes, as 32 hexadecimal digits."""
    return xxhash.xxh3_128(data).hexdigest()


def digest_of(path: Path, descriptor: int | None = None) -> str:
    """Return the checksum of a file, read in small pieces; one that is open already is closed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if descriptor is None else descriptor
    state = xxhash.xxh3_128()
    buffer = memoryview(bytearray(CHUNK))
    try:
        while count := os.readv(descriptor, [buffer]):
            state.update(buffer[:count])
            moved(count)
    finally:
        os.close(descriptor)
    return state.hexdigest()


def flush_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk, so that new names in it survive a power loss."""
    flush(folder, os.O_DIRECTORY)


def flush(path: Path, flags: int = 0) -> None:
    """Flush what is under a name to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
