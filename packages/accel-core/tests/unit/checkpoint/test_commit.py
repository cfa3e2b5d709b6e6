"""The table "States on disk and recovery" of docs/concepts/checkpoints.md, row by row."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_core.checkpoint import commit, disposal, folder, names, redo
from accel_core.checkpoint.digest import digest_of_bytes
from accel_core.checkpoint.manifest import Entry, Manifest, is_complete
from accel_core.checkpoint.run import BareRun
from accel_core.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError


def checkpoint(folder: Path, content: bytes, *, written_at: int = 1, manifest: bool = True) -> Path:
    """Make a folder with one file and, unless it is to be incomplete, a manifest."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    if manifest:
        entry = Entry("model.safetensors", len(content), digest_of_bytes(content))
        Manifest((entry,), 1, {}, written_at).write(folder)
    return folder


def content(folder: Path | None) -> bytes | None:
    """Return what the one file of a folder holds."""
    return None if folder is None else (folder / "model.safetensors").read_bytes()


def lay_out(directory: Path, target: str, beside: list[str]) -> Path:
    """Make a state on disk: what `ckpt` is, and prefixes and contents of the folders beside it.

    A folder that is `half` has no manifest, one that is `lost` or `short` has a manifest and not its file.
    """
    ckpt = directory / "ckpt"
    if target != "absent":
        harm(checkpoint(ckpt, target.encode(), manifest=target != "half"), target)
        if target == "half":
            (ckpt / names.PROGRESS_NAME).write_text("{}")
    for number, described in enumerate(beside):
        prefix, word = described.split(":")
        path = names.beside(ckpt, prefix, "abcdefghijk" + "lmnop"[number])
        harm(checkpoint(path, word.encode(), written_at=2 if word == "new" else 1, manifest=word != "half"), word)
    return ckpt


def harm(folder: Path, word: str) -> None:
    """Take the file of a folder that is to be `lost` or `short`, or a byte of it."""
    if word == "lost":
        (folder / "model.safetensors").unlink()
    elif word == "short":
        os.truncate(folder / "model.safetensors", 4)


def cannot_exchange(first: Path, second: Path) -> bool:
    """Be a system that has no exchange."""
    return False


ROWS = {
    "1": ("absent", [], None),
    "2": ("previous", [], b"previous"),
    "3": ("absent", [".tmp-:half"], None),
    "4": ("previous", [".tmp-:half"], b"previous"),
    "5": ("absent", [".tmp-:new"], b"new"),
    "6": ("previous", [".tmp-:new"], b"previous"),
    "7": ("absent", [".old-:previous", ".tmp-:new"], b"new"),
    "8": ("absent", [".old-:previous", ".tmp-:half"], b"previous"),
    "9, exchanged": ("new", [".tmp-:previous"], b"new"),
    "9, renamed": ("new", [".old-:previous"], b"new"),
    "10": ("new", [".gone-:half"], b"new"),
    "10, whole": ("new", [".gone-:previous"], b"new"),
    "11": ("absent", [".gone-:previous"], None),
    "12": ("new", [], b"new"),
    "13, renamed": ("half", [".old-:previous"], b"previous"),
    "13, staged": ("half", [".tmp-:new"], b"new"),
    "7, a file lost": ("absent", [".old-:previous", ".tmp-:lost"], b"previous"),
    "13, a file lost": ("lost", [".old-:previous"], b"previous"),
    "13, a file short": ("short", [".tmp-:new"], b"new"),
    "several staged": ("absent", [".tmp-:previous", ".tmp-:new", ".tmp-:half"], b"new"),
}


@pytest.mark.parametrize("row", ROWS)
def test_loading_finds_what_the_table_says(row: str, tmp_path: Path) -> None:
    """The folder that is loaded after a crash is the one of the table."""
    target, beside, expected = ROWS[row]
    ckpt = lay_out(tmp_path, target, beside)
    before = sorted(os.listdir(tmp_path))
    assert content(commit.find(ckpt)) == expected
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("row", ROWS)
def test_next_save_settles_what_the_table_says(row: str, tmp_path: Path) -> None:
    """Settling leaves the checkpoint of the table and nothing beside it."""
    target, beside, expected = ROWS[row]
    ckpt = lay_out(tmp_path, target, beside)
    commit.settle(ckpt)
    assert os.listdir(tmp_path) == (["ckpt"] if expected is not None else [])
    assert content(commit.find(ckpt)) == expected


def test_damaged_target_without_leftovers_is_refused_and_replaced(tmp_path: Path) -> None:
    """Row 14: what lost its manifest is no checkpoint, and the next save takes its place."""
    ckpt = lay_out(tmp_path, "half", [])
    assert commit.find(ckpt) is None
    with pytest.raises(CheckpointDamagedError, match="has lost its manifest"):
        Manifest.read(ckpt)
    commit.settle(ckpt)
    staging = checkpoint(names.beside(ckpt, names.STAGING, "abcdefghijkl"), b"new")
    commit.put_in_place(staging, ckpt, "abcdefghijkl")
    assert content(commit.find(ckpt)) == b"new"
    assert os.listdir(tmp_path) == ["ckpt"]


def test_absent_folder_is_not_found(tmp_path: Path) -> None:
    """Rows 1 and 3: nothing complete is there."""
    with pytest.raises(CheckpointNotFoundError, match="There is no checkpoint folder"):
        Manifest.read(tmp_path / "ckpt")


def test_truncated_manifest_is_not_complete(tmp_path: Path) -> None:
    """Row 15: a manifest of which a part reached the disk proves nothing."""
    ckpt = checkpoint(tmp_path / "ckpt", b"new")
    raw = (ckpt / names.MANIFEST_NAME).read_bytes()
    for length in range(len(raw)):
        (ckpt / names.MANIFEST_NAME).write_bytes(raw[:length])
        assert not is_complete(ckpt)
    (ckpt / names.MANIFEST_NAME).write_bytes(raw)
    assert is_complete(ckpt)


def test_everything_reaches_the_disk_before_it_counts(
    make_run: Callable[..., BareRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 15: files, then the manifest, then their folders are flushed before the exchange; after it, the parent."""
    run, events = make_run(1), []
    ckpt = tmp_path / "new" / "ckpt"

    def hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        Path(output_dir, "adapter").mkdir()
        Path(output_dir, "adapter", "own.txt").write_text("own")

    def note(event: str, path: str) -> None:
        inner = os.path.relpath(path, tmp_path)
        if inner.startswith("new/.tmp-ckpt-"):
            inner = "/".join(["staging", *inner.split("/")[2:]])
        events.append((event, inner))

    def watch(owner: Any, name: str, event: str, *, opened: bool) -> None:
        original = getattr(owner, name)

        def watched(first: Any, *rest: Any, **options: Any) -> Any:
            result = original(first, *rest, **options)
            note(event, os.readlink(f"/proc/self/fd/{first}") if opened else str(rest[0]))
            return result

        monkeypatch.setattr(owner, name, watched)

    run.save_state_pre_hooks[0] = hook
    watch(os, "fsync", "flush", opened=True)
    watch(os, "write", "write", opened=True)
    watch(commit, "_exchange", "exchange", opened=False)
    folder.save_state(run, ckpt)
    assert ("flush", ".") in events  # the folder above, which was made: its name in tmp_path is on the disk too
    events.clear()
    folder.save_state(run, ckpt)
    manifest = events.index(("write", f"staging/{names.MANIFEST_NAME}"))
    exchange = events.index(("exchange", "new/ckpt"))
    files = {entry.name for entry in Manifest.read(ckpt).entries}  # type: ignore[union-attr]
    assert {"adapter/own.txt", "model.safetensors", "optimizer.bin"} < files
    for name in files:
        writes = [at for at, event in enumerate(events) if event == ("write", f"staging/{name}")]
        assert max(writes, default=-1) < events.index(("flush", f"staging/{name}")) < manifest
    last = (f"staging/{names.MANIFEST_NAME}", "staging/adapter", "staging")
    order = [events.index(("flush", name)) for name in last]
    assert manifest < order[0] < order[1] < order[2] < exchange < events.index(("flush", "new"))


def test_nothing_is_deleted_under_a_name_that_is_read(
    make_run: Callable[..., BareRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 10 and 11: what is deleted is named `.gone-` before, and a complete newer checkpoint stands by then."""
    run, remove, deleted = make_run(1), disposal.remove, []

    def watched(gone: Path) -> None:
        deleted.append(gone.name.rpartition("-")[0])
        assert gone.name.startswith(names.GONE)
        assert commit.find(tmp_path / "ckpt") or is_complete(commit.numbered(tmp_path / "checkpoints")[-1])
        remove(gone)

    monkeypatch.setattr(disposal, "remove", watched)
    for _ in range(2):
        folder.save_state(run, tmp_path / "ckpt")
    (tmp_path / "ckpt").rename(tmp_path / "elsewhere")
    run.project.set_directories(str(tmp_path))
    run.project.automatic_checkpoint_naming, run.project.total_limit = True, 1
    for _ in range(2):
        folder.save_state(run)
    first = run.project.iteration - 2
    assert deleted == [".gone-ckpt", f".gone-checkpoint_{first}"]


@pytest.mark.parametrize("exchange", [True, False])
def test_putting_in_place_replaces_in_one_step(exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new folder takes the place of the old one, with and without an exchange by the system."""
    if not exchange:
        monkeypatch.setattr(commit, "_exchange", cannot_exchange)
    ckpt = checkpoint(tmp_path / "ckpt", b"previous")
    staging = checkpoint(names.beside(ckpt, names.STAGING, "abcdefghijkl"), b"new")
    commit.put_in_place(staging, ckpt, "abcdefghijkl")
    assert content(ckpt) == b"new"
    assert os.listdir(tmp_path) == ["ckpt"]


def test_without_exchange_a_failed_rename_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the new folder cannot take the name, the old one gets it back."""
    monkeypatch.setattr(commit, "_exchange", cannot_exchange)
    ckpt = checkpoint(tmp_path / "ckpt", b"previous")
    staging = checkpoint(names.beside(ckpt, names.STAGING, "abcdefghijkl"), b"new")
    rename, calls = os.rename, []

    def failing(source: Path, destination: Path) -> None:
        calls.append(source)
        if len(calls) == 3:
            raise PermissionError(13, "Permission denied")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(PermissionError):
        commit.put_in_place(staging, ckpt, "abcdefghijkl")
    assert content(ckpt) == b"previous"


def test_target_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """A checkpoint does not replace a file."""
    (tmp_path / "ckpt").write_text("mine")
    staging = checkpoint(tmp_path / ".tmp-ckpt-abcdefghijkl", b"new")
    with pytest.raises(CheckpointError, match="must be a folder"):
        commit.put_in_place(staging, tmp_path / "ckpt", "abcdefghijkl")
    assert (tmp_path / "ckpt").read_text() == "mine"


def test_foreign_files_are_linked_and_parts_are_not(tmp_path: Path) -> None:
    """What is no part of the old checkpoint comes along, as the same file; links stay links."""
    ckpt = checkpoint(tmp_path / "ckpt", b"previous")
    (ckpt / "notes.txt").write_text("mine")
    (ckpt / "logs").mkdir()
    (ckpt / "logs" / "events").write_text("events")
    (ckpt / "empty").mkdir()
    (ckpt / "link").symlink_to("notes.txt")
    (ckpt / "optimizer_3.bin").write_text("part of a checkpoint without a manifest")
    staging = checkpoint(tmp_path / ".tmp-ckpt-abcdefghijkl", b"new")
    commit.take_over_foreign_files(ckpt, staging)
    assert sorted(os.listdir(staging)) == [
        names.MANIFEST_NAME,
        "empty",
        "link",
        "logs",
        "model.safetensors",
        "notes.txt",
    ]
    assert os.path.samefile(staging / "logs" / "events", ckpt / "logs" / "events")
    assert os.readlink(staging / "link") == "notes.txt"
    assert content(staging) == b"new"


def test_pruning_keeps_the_newest_and_the_limit(tmp_path: Path) -> None:
    """The oldest numbered checkpoints go; the newest stays whatever the limit."""
    for number in (2, 9, 10, 11):
        checkpoint(tmp_path / f"checkpoint_{number}", b"x")
    (tmp_path / "checkpoint_best").mkdir()
    commit.prune(tmp_path / "checkpoint_11", 2)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_10", "checkpoint_11", "checkpoint_best"]
    commit.prune(tmp_path / "checkpoint_11", 0)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_11", "checkpoint_best"]


def test_latest_is_the_highest_complete_number(tmp_path: Path) -> None:
    """Half-written and deleted checkpoints are passed over; numbers are compared as numbers."""
    checkpoint(tmp_path / "checkpoint_9", b"nine")
    checkpoint(tmp_path / "checkpoint_10", b"ten")
    checkpoint(tmp_path / ".tmp-checkpoint_11-abcdefghijkl", b"eleven", manifest=False)
    checkpoint(tmp_path / ".gone-checkpoint_12-abcdefghijkl", b"twelve")
    assert content(commit.latest(tmp_path)) == b"ten"
    checkpoint(tmp_path / ".tmp-checkpoint_13-abcdefghijkl", b"thirteen")
    assert content(commit.latest(tmp_path)) == b"thirteen"
    assert commit.latest(tmp_path / "nowhere") is None


def test_leftovers_of_other_targets_are_left_alone(tmp_path: Path) -> None:
    """Another run that saves in the same directory is not disturbed."""
    other = checkpoint(tmp_path / ".tmp-ckpt-b-abcdefghijkl", b"other", manifest=False)
    commit.settle(tmp_path / "ckpt")
    assert other.is_dir()


def test_a_folder_that_cannot_be_exchanged_is_committed_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 16 to 18: a whole copy inside is the checkpoint; it is brought to its place, and stale parts go."""
    monkeypatch.setattr(redo, "is_needed", Path.is_dir)
    ckpt = checkpoint(tmp_path / "ckpt", b"previous")
    (ckpt / "notes.txt").write_text("mine")
    (ckpt / "optimizer.bin").write_text("stale")
    staging = commit.staging_of(ckpt, "abcdefghijkl")
    checkpoint(staging, b"new", manifest=False)
    assert content(commit.find(ckpt)) == b"previous"
    commit.settle(ckpt)
    assert not staging.exists()
    checkpoint(staging, b"new")
    assert commit.find(ckpt) == staging
    (ckpt / "model.safetensors").write_bytes(b"new")
    commit.settle(ckpt)
    assert commit.find(ckpt) == ckpt
    assert content(ckpt) == b"new"
    assert sorted(os.listdir(ckpt)) == [names.MANIFEST_NAME, "model.safetensors", "notes.txt"]
    staging = checkpoint(commit.staging_of(ckpt, "mnopqrstuvwx"), b"newest", written_at=3)
    commit.put_in_place(staging, ckpt, "mnopqrstuvwx")
    assert content(commit.find(ckpt)) == b"newest"
    assert sorted(os.listdir(ckpt)) == [names.MANIFEST_NAME, "model.safetensors", "notes.txt"]


def test_mount_points_cannot_be_exchanged(tmp_path: Path) -> None:
    """The root of a filesystem is one; an ordinary folder and an absent one are none."""
    assert redo.is_needed(Path("/"))
    assert not redo.is_needed(tmp_path)
    assert not redo.is_needed(tmp_path / "absent")


def test_files_added_to_a_target_after_a_crash_are_kept(tmp_path: Path) -> None:
    """Recovery replaces a folder that is no checkpoint, and takes along what lies in it."""
    checkpoint(tmp_path / ".tmp-ckpt-abcdefghijkl", b"new")
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "notes.txt").write_text("mine")
    commit.settle(tmp_path / "ckpt")
    assert (tmp_path / "ckpt" / "notes.txt").read_text() == "mine"
    assert content(tmp_path / "ckpt") == b"new"
