"""One place in an object store: requests through fsspec, repeated where that can help, with errors that say what to do.

No request is believed before its answer is whole: what is read has the length that was asked for, and what may have
been written although its answer was lost is looked at.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

from accel_core.checkpoint import names
from accel_core.checkpoint.address import Address
from accel_core.checkpoint.traffic import Traffic
from accel_core.errors import AccelError, CheckpointError, ConfigurationError, MissingDependencyError

__all__ = ["PARALLEL", "PART", "PROBE", "Store"]

logger = logging.getLogger(__name__)

PART = 16 << 20
"""Bytes of a file that go through memory at a time; two parts are under way."""

PARALLEL = 2
PROBE = ".accel-probe-"
_MOST_PARTS = 10_000  # that S3 takes of one object
_ATTEMPTS = 6
_PAUSE = 0.2
_DELETED = 1000
_LARGEST = 1 << 30
_STATE = ("ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "created")
_LASTING = (FileNotFoundError, FileExistsError, NotImplementedError)
_T = TypeVar("_T")


class Store:
    """The objects below an address; names are relative to it."""

    def __init__(self, address: Address, traffic: Traffic | None = None) -> None:
        self.address = address
        self.traffic = traffic or Traffic()
        self._fs, self._root = _opened(address)

    def below(self, name: str) -> Store:
        """Return the place of a name below this one."""
        return Store(Address(self.address / name), self.traffic)

    def children(self) -> list[str]:
        """Return the names of objects and folders directly below; none where nothing is."""

        def listed() -> list[str]:
            try:
                return [entry["name"] for entry in self._fs.ls(self._root, detail=True)]
            except FileNotFoundError as error:
                if "bucket does not exist" in str(error):  # s3 says so; of a place in it, s3fs gives the name
                    raise self._named("Listing", error, 1) from error
                return []

        found = self._attempt("Listing", listed)
        return sorted({name.rstrip("/").rpartition("/")[2] for name in found})

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the objects below a folder with their sizes; names are relative to the folder."""
        return {name: size for name, (size, _) in self.states(folder).items()}

    def states(self, folder: str) -> dict[str, tuple[int, str]]:
        """Return the objects below a folder with their sizes, and what changes when an object does."""

        def found() -> dict[str, Any]:
            try:
                return dict(self._fs.find(self._path(folder), detail=True))
            except FileNotFoundError:
                return {}

        root, listed = self._path(folder).strip("/") + "/", self._attempt("Listing", found).items()
        # Servers list empty folders too, and some clients put an object in place of one.
        files = [(name, each) for name, each in listed if each["type"] != "directory" and not name.endswith("/")]
        return {name.strip("/").removeprefix(root): _state_of(each) for name, each in files}

    def size(self, name: str) -> int | None:
        """Return the size of one object, asked for by its name; `None` where it is not."""
        found = self.state(name)
        return None if found is None else found[0]

    def state(self, name: str) -> tuple[int, str] | None:
        """Return the size of one object, and what changes when it does; `None` where it is not."""
        with contextlib.suppress(FileNotFoundError):
            return _state_of(self._attempt("Looking at", lambda: self._fs.info(self._path(name))))
        return None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return an object, or some bytes of it; a FileNotFoundError says that it is not there."""

        def read() -> bytes:
            # By range, which is one request: for a whole object libraries ask for its size first.
            found = bytes(self._fs.cat_file(self._path(name), start=start, end=_LARGEST if stop is None else stop))
            if stop is not None and len(found) != stop - start:
                raise OSError(f"{len(found)} bytes of {name} instead of {stop - start}")
            return found

        content = self._attempt("Reading", read)
        self.traffic.add(len(content))
        return content

    def put(self, path: Path, name: str) -> None:
        """Write a file of this machine, in parts."""
        size, call = path.stat().st_size, getattr(self._fs, "call_s3", None)
        if call is not None and size >= 2 * PART:
            self._attempt("Writing", lambda: self._put_parts(path, name, size, call))
        else:
            takes = inspect.signature(getattr(self._fs, "_put_file", self._fs.put_file)).parameters
            options: dict[str, Any] = {"chunksize": PART} if "chunksize" in takes else {}
            put, moved = self._fs.put_file, self.traffic.callback
            self._attempt("Writing", lambda: put(str(path), self._path(name), callback=moved(), **options))
        self.traffic.files += 1
        self.traffic.add(size)

    def _put_parts(self, path: Path, name: str, size: int, call: Callable[..., dict[str, Any]]) -> None:
        """Write a file to S3 in parts, each begun when another is done: s3fs waits for all of them before the next."""
        bucket, key, _ = self._fs.split_path(self._path(name))
        place = {"Bucket": bucket, "Key": key}
        place |= {"UploadId": call("create_multipart_upload", **place)["UploadId"]}
        length = max(PART, -(-size // _MOST_PARTS))

        def part(start: int) -> dict[str, Any]:
            with open(path, "rb") as file:
                file.seek(start)
                body = file.read(length)
            number = start // length + 1
            found = {"PartNumber": number, "ETag": call("upload_part", PartNumber=number, Body=body, **place)["ETag"]}
            self.traffic.add(0)
            return found

        try:
            with ThreadPoolExecutor(PARALLEL, thread_name_prefix="accel-upload") as pool:
                parts = list(pool.map(part, range(0, size, length)))
            call("complete_multipart_upload", MultipartUpload={"Parts": parts}, **place)
        except Exception:
            with contextlib.suppress(Exception):  # what failed says more
                call("abort_multipart_upload", **place)
            raise

    def create(self, name: str, content: bytes) -> bool:
        """Write a small object where none is; return whether this call did it: of several writers, one is told so."""

        def create() -> bool:
            try:
                self._create(name, content)
            except Exception:
                # It may be done, its answer lost; or another put was.
                if self._content(name) is None:
                    raise
                return self._content(name) == content
            return True

        return self._attempt("Writing", create)

    def probe(self) -> None:
        """Make sure that objects can be written, read and deleted here, and that a put can refuse to overwrite."""
        name = f"{PROBE}{names.fresh_id()}"
        takes = inspect.signature(getattr(self._fs, "_pipe_file", self._fs.pipe_file)).parameters
        # adlfs takes the mode of fsspec too, but lists the flag that it is for.
        found = None if {"mode", "overwrite"} & takes.keys() else "a library without one"
        if found is None:
            self.create(name, b"1")
            for _ in range(2):  # one may fail for a reason that passes
                _tried(lambda: self._create(name, b"2"))
            overwritten = self._content(name) != b"1"
            self.delete([name])
            found = "the second of two such puts accepted" if overwritten else None
        if found is not None:
            raise ConfigurationError(
                f"Objects at {str(self.address)!r} cannot be written only where none is (a conditional put); got "
                f"{found}. Two writers could mix a checkpoint. Use a store that has it, as S3, Google Cloud Storage "
                "and Azure do, and fsspec and its library for the store of December 2024 or later."
            )

    def delete(self, gone: Iterable[str]) -> None:
        """Delete objects, in their order; one that is not there is no error."""
        for name in gone:

            def delete(name: str = name) -> None:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(name))

            self._attempt("Deleting", delete)

    def delete_folder(self, folder: str) -> None:
        """Delete all objects below a folder, many in a request where the store takes that."""
        left = [f"{folder}/{name}" for name in self.sizes(folder)]
        if not left:
            self.delete_empty(folder)
        for start in range(0, len(left), _DELETED):
            paths = [self._path(name) for name in left[start : start + _DELETED]]

            def delete(paths: list[str] = paths) -> None:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm(paths)

            self._attempt("Deleting", delete)

    def delete_empty(self, folder: str = "") -> None:
        """Delete a folder below which nothing is: some servers of S3 keep it, and list it."""
        call = getattr(self._fs, "call_s3", None)
        if call is not None:
            bucket, key, _ = self._fs.split_path(self._path(folder))
            self._attempt("Deleting", lambda: call("delete_object", Bucket=bucket, Key=f"{key}/"))

    def _create(self, name: str, content: bytes) -> None:
        self._fs.pipe_file(self._path(name), content, mode="create")

    def _content(self, name: str) -> bytes | None:
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _attempt(self, doing: str, call: Callable[[], _T]) -> _T:
        """Do a request, again after a pause where it failed for a reason that may pass."""
        for attempt in range(1, _ATTEMPTS + 1):
            self._fs.invalidate_cache()
            found, error = _tried(call)
            if error is None:
                return cast(_T, found)
            if isinstance(error, AccelError) or (isinstance(error, FileNotFoundError) and doing != "Writing"):
                raise error
            if attempt == _ATTEMPTS or isinstance(error, _LASTING) or _status(error) in (401, 403):
                raise self._named(doing, error, attempt) from error
            self.traffic.retries += 1
            logger.info("%s %s failed, and is tried again: %s", doing, self.address, error)
            time.sleep(_PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
        raise AssertionError("every attempt returns or raises")

    def _named(self, doing: str, error: Exception, attempts: int) -> AccelError:
        """Return the error for a request that failed for good."""
        at, got = repr(str(self.address)), f"{type(error).__name__}: {error}"
        if _status(error) == 401:
            return ConfigurationError(
                f"There are no credentials for the store of {at}; got {got}. Give them to every process, where the "
                "store's library looks for them: for s3:// in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "~/.aws/credentials or a role of the machine; for gs:// in GOOGLE_APPLICATION_CREDENTIALS or a role."
            )
        if "Skewed" in f"{got} {error.__cause__}" or "difference between the request time" in got:
            return ConfigurationError(
                f"The store of {at} refuses requests because this machine's clock is off; got {got}. Set the clock, "
                "best by NTP."
            )
        if _status(error) == 403:
            return ConfigurationError(
                f"{doing} {at} is not allowed; got {got}. Give these credentials the right to list, read, write and "
                "delete objects there."
            )
        if isinstance(error, FileNotFoundError):
            return ConfigurationError(f"The bucket of {at} is not there; got {got}. Create it, or correct the address.")
        if isinstance(error, NotImplementedError):
            return ConfigurationError(
                f"Checkpoints cannot be kept at {at}: {doing.lower()} is nothing that its store can do; got {got}. "
                "Use an object store, such as s3://, gs:// or abfs://."
            )
        return CheckpointError(
            f"{doing} {at} failed {attempts} times; got {got}. Check the network and the store, and call again."
        )


def _tried(call: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def _state_of(entry: Mapping[str, Any]) -> tuple[int, str]:
    """Return the size of an object as its store tells it, and what changes when it does."""
    return int(entry["size"]), str([str(entry[key]) for key in _STATE if key in entry])


def _opened(address: Address) -> tuple[Any, str]:
    """Return fsspec's file system for an address, and the path of the address in it."""
    try:
        fsspec: Any = importlib.import_module("fsspec")
    except ImportError as error:
        raise MissingDependencyError(
            f"Checkpoints at an address need fsspec; got {str(address)!r}, and fsspec is not installed. Run "
            "`pip install 'accel-core[remote]'`."
        ) from error
    if address.scheme not in fsspec.available_protocols():
        raise ConfigurationError(
            f"No store has the scheme {address.scheme!r}; got {str(address)!r}. Write s3://, gs://, abfs://, memory:// "
            f"or another of fsspec's: {', '.join(sorted(fsspec.available_protocols()))}."
        )
    try:
        fs, root = fsspec.core.url_to_fs(str(address), use_listings_cache=False)
    except ImportError as error:
        raise MissingDependencyError(
            f"The library that talks to {address.scheme}:// is not installed; got {str(address)!r}, and fsspec says: "
            f"{error}. Install it on every machine."
        ) from error
    except Exception as error:
        raise ConfigurationError(
            f"The store of {str(address)!r} could not be opened; got {type(error).__name__}: {error}. Check the "
            "address, and the settings of the library that talks to it."
        ) from error
    return fs, str(root).rstrip("/")


def _status(error: Exception) -> object:
    """Return the status of the answer that an error stands for: 401 without credentials, 403 without rights."""
    if "credential" in type(error).__name__.lower():
        return 401
    if isinstance(error, PermissionError) or str(error).startswith("Forbidden: "):  # which is all that gcsfs says
        return 403
    return getattr(error, "status_code", getattr(error, "code", None))
