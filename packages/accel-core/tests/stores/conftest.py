"""An object store for all tests of this folder, and a bucket for each."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_server import LIBRARY, SCHEME, FaultyProxy, file_system, serving, settings

from accel_core.checkpoint.remote import storage, store
from accel_core.process.world import destroy


@pytest.fixture(scope="session")
def server() -> Iterator[FaultyProxy]:
    """Run one server, as starting it takes a second."""
    pytest.importorskip(LIBRARY)
    with serving() as proxy:
        yield proxy


@pytest.fixture
def s3(
    server: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[FaultyProxy]:
    """Return the server for a test whose clients find it, and in which nothing waits before a request is repeated."""
    for name, value in settings(server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(store, "_PAUSE", 0.0)
    storage._probed.clear()
    file_system()
    server.begin()
    yield server
    server.begin()
    destroy()


@pytest.fixture
def bucket(s3: FaultyProxy, tmp_path: Path) -> str:
    """Return the address of a fresh bucket."""
    name = f"bucket-{abs(hash(str(tmp_path))):x}"
    file_system()().mkdir(name)
    s3.begin()
    return f"{SCHEME}://{name}"
