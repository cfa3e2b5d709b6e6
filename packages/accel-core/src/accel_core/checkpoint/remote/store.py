"""One place in an object store: requests through fsspec, repeated where that can help, with errors that say what to do.

What may have been written although its answer was lost is looked at.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from accel_core.checkpoint import names
from accel_core.checkpoint.address import Address
from accel_core.errors import AccelError, CheckpointError, ConfigurationError, MissingDependencyError

logger = logging.getLogger(__name__)

PARALLEL = 2
"""Requests under way at a time."""

PROBE = ".accel-probe-"
_ATTEMPTS = 6
_PAUSE = 0.2
_LARGEST = 1 << 30
_LASTING = (FileNotFoundError, FileExistsError)
_STATE = ("ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "created")
_T = TypeVar("_T")


def at_once(function: Callable[..., _T], *values: Iterable[Any]) -> list[_T]:
    """Return what a function returns for each of some values, as `map` calls it, for several at a time."""
    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="accel-store") as pool:
        return list(pool.map(function, *values))


class Store:
    """The objects below an address; names are relative to it."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._fs, self._root = _opened(address)

    def below(self, name: str) -> Store:
        """Return the place of a name below this one."""
        return Store(Address(self.address / name))

    def children(self) -> list[str]:
        """Return the names of objects and folders directly below; none where nothing is."""

        def listed() -> list[str]:
            try:
                return [entry["name"] for entry in self._fs.ls(self._root, detail=True)]
            except FileNotFoundError as error:
                if "bucket does not exist" in str(error):  # s3 says so; of a place in it, s3fs gives the name
                    raise self._named("Listing", error) from error
                return []

        found = self._request("Listing", listed)
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

        root, listed = self._path(folder).strip("/") + "/", self._request("Listing", found).items()
        # Servers list empty folders too, and some clients put an object in place of one.
        files = [(name, each) for name, each in listed if each["type"] != "directory" and not name.endswith("/")]
        return {name.strip("/").removeprefix(root): _state_of(each) for name, each in files}

    def read(self, name: str) -> bytes:
        """Return a small object; a FileNotFoundError says that it is not there."""
        # By range, which is one request: for a whole object libraries ask for its size first.
        return self._request("Reading", lambda: bytes(self._fs.cat_file(self._path(name), start=0, end=_LARGEST)))

    def get(self, name: str, path: Path) -> None:
        """Bring an object into a file of this machine; a FileNotFoundError says that it is not there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._request("Reading", lambda: self._fs.get_file(self._path(name), str(path)))

    def put(self, path: Path, name: str) -> None:
        """Write a file of this machine."""
        self._request("Writing", lambda: self._fs.put_file(str(path), self._path(name)))

    def put_all(self, files: Mapping[Path, str]) -> None:
        """Write several files, some at a time."""
        at_once(self.put, files, files.values())

    def get_all(self, files: Mapping[str, Path]) -> None:
        """Bring several objects to this machine, some at a time; what is not there is left out."""

        def get(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self.get(name, files[name])

        at_once(get, files)

    def create(self, name: str, content: bytes) -> bool:
        """Write a small object where none is; return whether this call did it: of several writers, one is told so."""

        def create() -> bool:
            try:
                self._create(name, content)
            except Exception:
                # It may be done, its answer lost; or another put was.
                found = self._content(name)
                if found is None:
                    raise
                return found == content
            return True

        return self._request("Writing", create)

    def probe(self) -> None:
        """Make sure that objects can be written, read and deleted here, and that a put can refuse to overwrite."""
        name = f"{PROBE}{names.fresh_id()}"
        self.create(name, b"1")
        with contextlib.suppress(Exception):  # the answer that is wanted; what it wrote is looked at
            self._create(name, b"2")
        overwritten = self._content(name) != b"1"
        self.delete([name])
        if overwritten:
            raise ConfigurationError(
                f"Objects at {str(self.address)!r} cannot be written only where none is (a conditional put); got the "
                "second of two such puts accepted. Two writers could mix a checkpoint. Use a store that has it, as S3, "
                "Google Cloud Storage and Azure do, and fsspec and its library for the store of December 2024 or later."
            )

    def delete(self, gone: Iterable[str]) -> None:
        """Delete objects, in their order; one that is not there is ignored."""
        for name in gone:

            def delete(name: str = name) -> None:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(name))

            self._request("Deleting", delete)

    def delete_folder(self, folder: str) -> None:
        """Delete all objects below a folder, many in a request where the store takes that."""
        left = [self._path(f"{folder}/{name}") for name in self.sizes(folder)]

        def delete() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(left)

        if left:
            self._request("Deleting", delete)

    def _create(self, name: str, content: bytes) -> None:
        self._fs.pipe_file(self._path(name), content, mode="create")

    def _content(self, name: str) -> bytes | None:
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _request(self, doing: str, call: Callable[[], _T]) -> _T:
        """Do a request, again after a pause where it failed for a reason that may pass; other failures get a name."""
        for attempt in range(1, _ATTEMPTS + 1):
            self._fs.invalidate_cache()
            try:
                return call()
            except AccelError:
                raise
            except Exception as error:
                if isinstance(error, FileNotFoundError) and doing != "Writing":
                    raise
                if attempt == _ATTEMPTS or isinstance(error, _LASTING) or _status(error) in (401, 403):
                    raise self._named(doing, error) from error
                logger.info("%s %s failed, and is tried again: %s", doing, self.address, error)
            time.sleep(_PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
        raise AssertionError("every attempt returns or raises")

    def _named(self, doing: str, error: Exception) -> AccelError:
        """Return the error for a request that failed."""
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
        return CheckpointError(
            f"{doing} {at} failed {_ATTEMPTS} times; got {got}. Check the network and the store, and call again."
        )


def _state_of(entry: Mapping[str, Any]) -> tuple[int, str]:
    """Return the size of an object as its store tells it, and what changes when it does."""
    return int(entry["size"]), str([str(entry[key]) for key in _STATE if key in entry])


def _opened(address: Address) -> tuple[Any, str]:
    """Return fsspec's file system for an address, and the path of the address in it."""
    try:
        fsspec: Any = importlib.import_module("fsspec")
        fs, root = fsspec.core.url_to_fs(str(address), use_listings_cache=False)
    except ImportError as error:
        raise MissingDependencyError(
            f"The library that talks to {address.scheme}:// is not installed; got {str(address)!r}, and {error}. Run "
            "`pip install 'accel-core[remote]'`, and install what fsspec names, on every machine."
        ) from error
    except Exception as error:
        raise ConfigurationError(
            f"The store of {str(address)!r} could not be opened; got {type(error).__name__}: {error}. Write s3://, "
            "gs://, abfs:// or another scheme of fsspec's, and check the settings of the library that talks to it."
        ) from error
    return fs, str(root).rstrip("/")


def _status(error: Exception) -> object:
    """Return the status of the answer that an error stands for: 401 without credentials, 403 without rights."""
    if "credential" in type(error).__name__.lower():
        return 401
    if isinstance(error, PermissionError) or str(error).startswith("Forbidden: "):  # which is all that gcsfs says
        return 403
    return getattr(error, "status_code", getattr(error, "code", None))
