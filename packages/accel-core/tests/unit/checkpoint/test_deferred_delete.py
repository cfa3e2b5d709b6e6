"""Deleting folders whose space is freed in the background."""

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from accel_core.checkpoint import deferred_delete
from accel_core.testing import limits


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Give a folder with two files that are worth a thread, one of them with a second name outside, and a small one."""
    folder = tmp_path / "gone"
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "large").write_bytes(bytes(2 << 20))
    (folder / "shared").write_bytes(bytes(2 << 20))
    os.link(folder / "shared", tmp_path / "kept")
    (folder / "small").write_bytes(b"x")
    (folder / "link").symlink_to(tmp_path / "kept")
    return folder


def open_files(folder: Path) -> list[str]:
    """Return what this process holds open of a folder, deleted or not."""
    links = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    paths = [os.readlink(link) for link in links if os.path.lexists(link)]
    return [path for path in paths if path.startswith(str(folder))]


def test_names_are_gone_at_once_and_space_later(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call does not wait for the blocks of a large file; `wait` does. Other names of a file stay."""
    gate, close = threading.Event(), deferred_delete._close

    def slow(descriptors: list[int]) -> None:
        gate.wait(limits.limit())
        close(descriptors)

    monkeypatch.setattr(deferred_delete, "_close", slow)
    deferred_delete.remove(large)
    assert not large.exists()
    assert open_files(large) == [f"{large}/below/large (deleted)"]
    gate.set()
    deferred_delete.wait()
    assert open_files(large) == []
    assert (large.parent / "kept").stat().st_size == 2 << 20


def test_filesystems_that_keep_open_files_in_the_folder(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a folder with deleted open files is not empty, as over NFS, files are closed first."""
    remove, held = shutil.rmtree, []

    def as_over_nfs(folder: Path) -> None:
        held.append(open_files(large))
        if held[-1]:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        remove(folder)

    monkeypatch.setattr(shutil, "rmtree", as_over_nfs)
    deferred_delete.remove(large)
    assert [len(files) for files in held] == [1, 0]
    assert not large.exists()


def test_nothing_is_held_where_deleting_fails_or_no_thread_starts(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error is passed on, and an interpreter that ends frees the space itself."""

    def refused(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refused)
        with pytest.raises(PermissionError):
            deferred_delete.remove(large)
    assert open_files(large) == []
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    deferred_delete.remove(large)
    assert open_files(large) == []
    assert not large.exists()
