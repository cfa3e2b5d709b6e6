"""The list of what is in a checkpoint."""

import dataclasses
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_core._version import __version__
from accel_core.checkpoint import commit, names
from accel_core.checkpoint.digest import HashingFile, digest_of_bytes
from accel_core.checkpoint.manifest import Entry, Manifest, open_member, versions
from accel_core.errors import AccelError, CheckpointDamagedError, UnsafeCheckpointError

WHOLE = Manifest(
    (Entry("a.bin", 3, digest_of_bytes(b"abc")), Entry("sub/b", 0, digest_of_bytes(b""))), 2, {"torch": "2"}, 7
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a folder that WHOLE describes."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.bin").write_bytes(b"abc")
    (tmp_path / "sub" / "b").write_bytes(b"")
    WHOLE.write(tmp_path)
    return tmp_path


def test_manifest_comes_back_as_written(folder: Path) -> None:
    """Reading gives what was written, and whole files are not complained about."""
    assert Manifest.read(folder) == WHOLE
    assert WHOLE.damages(folder) == {}
    assert commit.find(folder) == folder
    assert "a.bin" in WHOLE
    assert "b" not in WHOLE


@pytest.mark.parametrize("absent", [-1, True, "1"])
def test_an_impossible_number_of_absent_ranks_is_damage(absent: object, tmp_path: Path) -> None:
    """How many ranks a save was made without is read back; anything but a count is refused."""
    alone = dataclasses.replace(WHOLE, absent=3)
    alone.write(tmp_path)
    assert Manifest.read(tmp_path) == alone
    with pytest.raises(CheckpointDamagedError, match="bytes that do not fit"):
        Manifest.decode(dataclasses.replace(WHOLE, absent=absent).encode(), tmp_path)


def test_versions_name_core_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest says what wrote it; of other packages, whose descriptions are long, none is read."""
    read: list[str] = []
    text_of = importlib.metadata.PathDistribution.read_text

    def watched(self: Any, name: str) -> str | None:
        read.append(self._path.name)
        return text_of(self, name)

    monkeypatch.setattr(importlib.metadata.PathDistribution, "read_text", watched)
    versions.cache_clear()
    found = versions()
    assert all(name.startswith("accel") for name in read)
    every = {each.name: each.version for each in importlib.metadata.distributions()}
    ours = {name: version for name, version in every.items() if name == "accelerate" or name.startswith("accel-")}
    assert found == ours | {"accel-core": __version__, "torch": str(torch.__version__)}


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(b"ab"), "has 2 bytes instead of 3"),
        (lambda path: path.write_bytes(b"abd"), "has checksum"),
    ],
)
def test_harm_to_a_file_is_named(folder: Path, harm: object, words: str) -> None:
    """A file that is gone, shorter or altered is told apart."""
    harm(folder / "a.bin")  # type: ignore[operator]
    assert words in WHOLE.damages(folder)["a.bin"]


def test_every_flipped_bit_of_the_manifest_is_found(folder: Path) -> None:
    """No single bit of the manifest can change unnoticed."""
    raw = bytearray((folder / names.MANIFEST_NAME).read_bytes())
    for position in range(len(raw) * 8):
        raw[position // 8] ^= 1 << position % 8
        with pytest.raises(CheckpointDamagedError, match="manifest"):
            Manifest.decode(bytes(raw), folder / names.MANIFEST_NAME)
        raw[position // 8] ^= 1 << position % 8


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../../b", "", ".", "a//b", "a\\b", "a\0b"])
def test_names_that_lead_outside_are_refused(name: str, tmp_path: Path) -> None:
    """A manifest, however well signed, cannot name a file outside its folder."""
    manifest = dataclasses.replace(WHOLE, entries=(Entry(name, 1, "0"),))
    manifest.write(tmp_path)
    with pytest.raises(UnsafeCheckpointError, match="leads outside"):
        Manifest.read(tmp_path)


def test_fifo_and_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    """Only regular files inside the folder are opened; a FIFO does not hang the reader."""
    inside = tmp_path / "ckpt"
    inside.mkdir()
    (tmp_path / "secret").write_text("x")
    os.mkfifo(inside / "fifo")
    (inside / "out").symlink_to("../secret")
    (inside / "real").write_text("x")
    (inside / "in").symlink_to("real")
    (inside / "folder").mkdir()
    with pytest.raises(UnsafeCheckpointError, match="is a FIFO"):
        open_member(inside, "fifo")
    with pytest.raises(UnsafeCheckpointError, match="is a folder"):
        open_member(inside, "folder")
    with pytest.raises(UnsafeCheckpointError, match="leads out of its folder"):
        open_member(inside, "out")
    for name, links in (("in", False), ("out", True)):
        os.close(open_member(inside, name, links=links))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "entries": JSON | st.lists(st.fixed_dictionaries({"name": JSON, "size": JSON, "digest": JSON, "rank": JSON})),
        "world_size": JSON,
        "versions": JSON,
        "written_at": JSON,
        "format": JSON,
        "digest": JSON,
    },
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=64)
    | JSON.map(lambda value: json.dumps(value).encode())
    | FIELDS.map(lambda value: json.dumps(value).encode())
)
def test_invented_manifests_are_refused_by_name(raw: bytes) -> None:
    """Whatever stands in the file, the error is one of ours and names it."""
    with pytest.raises(AccelError, match="accel_manifest"):
        Manifest.decode(raw, Path("ckpt") / names.MANIFEST_NAME)


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    """Two writers of one name are noticed."""
    with HashingFile(tmp_path / "a") as file:
        file.write(b"abc")
    with pytest.raises(FileExistsError):
        HashingFile(tmp_path / "a")
