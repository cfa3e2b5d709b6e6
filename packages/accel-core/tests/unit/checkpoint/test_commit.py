"""The table of states on disk in commit.py, row by row."""

import errno
import json
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_core.checkpoint import commit, deferred_delete, in_place, names
from accel_core.checkpoint.agreement import agree_on_latest
from accel_core.checkpoint.digest import digest_of_bytes
from accel_core.checkpoint.load import load_state
from accel_core.checkpoint.manifest import Entry, Manifest, found_save
from accel_core.checkpoint.ranks import Ranks
from accel_core.checkpoint.run import BareRun
from accel_core.checkpoint.save import Transaction, save_state
from accel_core.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError, UnsafeCheckpointError


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


def latest(directory: Path) -> Path:
    """Return the target of the latest complete checkpoint of a directory, as one rank finds it."""
    return agree_on_latest(directory, Ranks(BareRun().world, "load_state"))


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
        path = commit.sibling_path(ckpt, prefix, "abcdefghijk" + "lmnop"[number])
        harm(checkpoint(path, word.encode(), written_at=2 if word == "new" else 1, manifest=word != "half"), word)
    return ckpt


def harm(folder: Path, word: str) -> None:
    """Take the file of a folder that is to be `lost` or `short`, or a byte of it."""
    if word == "lost":
        (folder / "model.safetensors").unlink()
    elif word == "short":
        os.truncate(folder / "model.safetensors", 4)


def inside(target: Path, state: str) -> Path:
    """Return a folder in a state of a save inside a target; the hidden folder above it is made."""
    path = in_place.state_journal(target).folder / f"abcdefghijkl.{state}"
    path.parent.mkdir(exist_ok=True)
    return path


def no_links(*args: Any, **kwargs: Any) -> None:
    """Be a filesystem that has no hard links."""
    raise OSError(errno.EPERM, "Operation not permitted")


ROWS = {
    "1": ("absent", [], None),
    "2": ("previous", [], b"previous"),
    "3": ("absent", [".tmp-:half"], None),
    "4": ("previous", [".tmp-:half"], b"previous"),
    "5": ("absent", [".tmp-:new"], b"new"),
    "6": ("previous", [".tmp-:new"], b"previous"),
    "9, whole beside": ("new", [".tmp-:previous"], b"new"),
    "10": ("new", [".gone-:half"], b"new"),
    "10, whole": ("new", [".gone-:previous"], b"new"),
    "11": ("absent", [".gone-:previous"], None),
    "12": ("new", [], b"new"),
    "13, staged": ("half", [".tmp-:new"], b"new"),
    "3, a file lost": ("absent", [".tmp-:lost"], None),
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
    commit.recover(ckpt)
    assert os.listdir(tmp_path) == (["ckpt"] if expected is not None else [])
    assert content(commit.find(ckpt)) == expected


INSIDE = {
    "5, incomplete": ("previous", "writing", "half", b"previous"),
    "5, complete": ("previous", "writing", "new", b"previous"),
    "6": ("absent", "writing", "half", None),
    "7": ("absent", "writing", "new", b"new"),
    "7, damaged": ("lost", "writing", "new", b"new"),
    "8": ("previous", "committed", "new", b"new"),
    "8, a mixture": ("short", "committed", "new", b"new"),
    "8, first save": ("absent", "committed", "new", b"new"),
    "8, damaged": ("previous", "committed", "lost", b"previous"),
    "9": ("new", "gone", "previous", b"new"),
    "9, incomplete": ("new", "gone", "lost", b"new"),
}


def lay_inside(directory: Path, target: str, state: str, word: str) -> Path:
    """Make a state of a save into a folder that exists and holds a file of somebody else."""
    ckpt = lay_out(directory, target, [])
    ckpt.mkdir(exist_ok=True)
    (ckpt / "notes.txt").write_text("mine")
    path = inside(ckpt, state)
    checkpoint(path, word.encode(), written_at=2, manifest=False)
    if word != "half":
        in_place.state_journal(ckpt).prepare(path)
        entry = Entry("model.safetensors", len(word), digest_of_bytes(word.encode()))
        Manifest((entry,), 1, {}, 2, "abcdefghijkl").write(path)
        harm(path, word)
    return ckpt


@pytest.mark.parametrize("row", INSIDE)
def test_saves_into_a_folder_that_exists_recover_as_the_table_says(row: str, tmp_path: Path) -> None:
    """What is loaded from a target after a crash inside it, and what the next save makes of it; foreign files stay."""
    target, state, word, expected = INSIDE[row]
    ckpt = lay_inside(tmp_path, target, state, word)
    before = sorted(os.listdir(ckpt))
    assert content(commit.find(ckpt)) == expected
    assert sorted(os.listdir(ckpt)) == before
    commit.recover(ckpt)
    assert content(commit.find(ckpt)) == expected
    assert commit.find(ckpt) in (None, ckpt)
    assert sorted(os.listdir(ckpt)) == [*([names.MANIFEST_NAME, "model.safetensors"] if expected else []), "notes.txt"]
    assert (ckpt / "notes.txt").read_text() == "mine"
    assert os.listdir(tmp_path) == ["ckpt"]


def test_what_is_complete_beside_goes_into_a_folder_that_somebody_made(tmp_path: Path) -> None:
    """Row 10: the folder stays the folder that it is."""
    checkpoint(tmp_path / ".tmp-ckpt-abcdefghijkl", b"new")
    ckpt = tmp_path / "ckpt"
    ckpt.mkdir(mode=0o750)
    (ckpt / "notes.txt").write_text("mine")
    number = ckpt.stat().st_ino
    commit.recover(ckpt)
    assert (ckpt.stat().st_ino, stat.S_IMODE(ckpt.stat().st_mode)) == (number, 0o750)
    assert (ckpt / "notes.txt").read_text() == "mine"
    assert content(ckpt) == b"new"
    assert os.listdir(tmp_path) == ["ckpt"]


def publish(target: Path, word: bytes, identity: str = "abcdefghijkl") -> None:
    """Save a file into a target by all the steps."""
    staging = commit.stage(target, identity)
    (staging / "model.safetensors").write_bytes(word)
    entry = Entry("model.safetensors", len(word), digest_of_bytes(word))
    commit.complete(staging, target, Manifest((entry,), 1, {}, 3, identity))
    commit.publish(staging, target)


def test_damaged_target_is_refused_and_replaced(tmp_path: Path) -> None:
    """Row 12: what lost its manifest is no checkpoint, and the next save takes its place."""
    ckpt = lay_out(tmp_path, "half", [])
    (ckpt / "optimizer_3.bin").write_text("part of the damaged checkpoint")
    assert commit.find(ckpt) is None
    with pytest.raises(CheckpointDamagedError, match="has lost its manifest"):
        Manifest.read(ckpt)
    commit.recover(ckpt)
    publish(ckpt, b"new")
    assert content(commit.find(ckpt)) == b"new"
    assert sorted(os.listdir(ckpt)) == [names.MANIFEST_NAME, "model.safetensors"]
    assert os.listdir(tmp_path) == ["ckpt"]


def test_absent_folder_is_not_found(tmp_path: Path) -> None:
    """Rows 1 and 3: nothing complete is there."""
    with pytest.raises(CheckpointNotFoundError, match="No checkpoint at"):
        Manifest.read(tmp_path / "ckpt")


def test_truncated_manifest_is_not_complete(tmp_path: Path) -> None:
    """Row 15: a manifest of which a part reached the disk proves nothing."""
    ckpt = checkpoint(tmp_path / "ckpt", b"new")
    raw = (ckpt / names.MANIFEST_NAME).read_bytes()
    for length in range(len(raw)):
        (ckpt / names.MANIFEST_NAME).write_bytes(raw[:length])
        assert not found_save(ckpt).whole
    (ckpt / names.MANIFEST_NAME).write_bytes(raw)
    assert found_save(ckpt).whole


def events_of_a_save(run: BareRun, ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Save, and return what was written, flushed and renamed, in order; staging folders have no id."""
    events: list[tuple[str, str]] = []

    def note(event: str, path: str) -> None:
        inner = os.path.relpath(path, ckpt.parent)
        for begin in (".tmp-ckpt-", f"ckpt/{names.JOURNAL_NAME}/"):
            if inner.startswith(begin):
                inner = "/".join(["staging", *inner[len(begin) :].split("/")[1:]])
        events.append((event, inner))

    def watch(owner: Any, name: str, event: str, *, opened: bool) -> None:
        original = getattr(owner, name)

        def watched(first: Any, *rest: Any, **options: Any) -> Any:
            result = original(first, *rest, **options)
            note(event, os.readlink(f"/proc/self/fd/{first}") if opened else str(rest[0]))
            return result

        monkeypatch.setattr(owner, name, watched)

    with monkeypatch.context():
        watch(os, "fsync", "flush", opened=True)
        watch(os, "write", "write", opened=True)
        watch(os, "rename", "rename", opened=False)
        watch(commit, "_rename_if_absent", "put in place", opened=False)
        save_state(run, ckpt)
    monkeypatch.undo()
    return events


def test_everything_reaches_the_disk_before_it_counts(
    make_run: Callable[..., BareRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, then the manifest, then their folders are flushed before the commit; after it, the folder of the name."""
    run = make_run(1)
    ckpt = tmp_path / "new" / "ckpt"

    def hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        Path(output_dir, "adapter").mkdir()
        Path(output_dir, "adapter", "own.txt").write_text("own")

    run.save_state_pre_hooks[0] = hook
    fresh = events_of_a_save(run, ckpt, monkeypatch)
    assert ("flush", "..") in fresh  # the folder above, which was made: its name in tmp_path is on the disk too
    again = events_of_a_save(run, ckpt, monkeypatch)
    files = {entry.name for entry in Manifest.read(ckpt).entries}  # type: ignore[union-attr]
    assert {"adapter/own.txt", "model.safetensors", "optimizer.bin"} < files
    for events, commits in ((fresh, ("put in place", "ckpt")), (again, ("rename", "staging"))):
        manifest, step = events.index(("write", f"staging/{names.MANIFEST_NAME}")), events.index(commits)
        for name in files:
            writes = [at for at, event in enumerate(events) if event == ("write", f"staging/{name}")]
            assert max(writes, default=-1) < events.index(("flush", f"staging/{name}")) < manifest
        last = (f"staging/{names.MANIFEST_NAME}", "staging/adapter", "staging")
        order = [events.index(("flush", name)) for name in last]
        assert manifest < order[0] < order[1] < order[2] < step
    assert fresh[-1] == ("flush", ".")
    placed = again[again.index(("rename", "staging")) :]
    assert placed[1] == ("flush", f"ckpt/{names.JOURNAL_NAME}")
    public = placed.index(("rename", f"ckpt/{names.MANIFEST_NAME}"))
    assert {("rename", f"ckpt/{name}") for name in files} <= set(placed[:public])
    flushed = placed.index(("flush", "ckpt"))
    assert public < flushed < placed.index(("rename", "staging"), 1)  # only then the hidden folder is given up


def test_nothing_is_deleted_under_a_name_that_is_read(
    make_run: Callable[..., BareRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 9 and 11: what is deleted is no commit any more, and a complete newer checkpoint stands by then."""
    run, remove, deleted = make_run(1), deferred_delete.remove, list[str]()

    def watched(gone: Path) -> None:
        deleted.append(gone.name.rpartition("-")[0] or gone.suffix)
        ended = gone.name.startswith(".gone-")
        newest = commit.numbered(tmp_path / "checkpoints")[-1] if ended else tmp_path / "ckpt"
        assert commit.find(newest) == newest
        remove(gone)

    monkeypatch.setattr(deferred_delete, "remove", watched)
    for _ in range(2):
        save_state(run, tmp_path / "ckpt")
    run.project.set_directories(str(tmp_path))
    run.project.automatic_checkpoint_naming, run.project.total_limit = True, 1
    for _ in range(2):
        save_state(run)
    first = run.project.iteration - 2
    assert deleted == [".gone", f".gone-checkpoint_{first}"]
    assert os.listdir(tmp_path / "checkpoints") == [f"checkpoint_{first + 1}"]


@pytest.mark.parametrize("stands", [False, True])
@pytest.mark.parametrize("silent", ["finish", "_publish"])
def test_a_save_that_another_overtook_takes_no_place(
    silent: str, stands: bool, make_run: Callable[..., BareRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a process that is silent in a save, while another one saves there, the older state is refused in the end."""
    ckpt, go_on = tmp_path / "ckpt", getattr(Transaction, silent)
    if stands:
        save_state(make_run(3), ckpt)

    def late(*args: Any, **kwargs: Any) -> object:
        monkeypatch.undo()
        save_state(make_run(2), ckpt)
        return go_on(*args, **kwargs)

    monkeypatch.setattr(Transaction, silent, late)
    with pytest.raises(CheckpointError, match=r"got one that another save to the same|could not be committed"):
        save_state(make_run(1), ckpt)
    loaded = make_run(9)
    load_state(loaded, ckpt)
    assert loaded.step == 2
    assert os.listdir(tmp_path) == ["ckpt"]
    assert not list((ckpt / names.JOURNAL_NAME).glob("*"))


def test_what_a_failed_save_leaves_alone(make_run: Callable[..., BareRun], tmp_path: Path) -> None:
    """A save that fails deletes what is its own, and nothing of another one that has begun in the same folder."""
    ckpt = tmp_path / "ckpt"
    save_state(make_run(1), ckpt)
    own, other = (commit.stage(ckpt, identity) for identity in ("abcdefghijkl", "abcdefghijkm"))
    commit.undo(own, ckpt)
    assert not own.exists()
    assert other.is_dir()


@pytest.mark.parametrize("links", [True, False])
def test_putting_in_place_replaces_what_is_ours(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New files take the places of old ones, with and without hard links; nothing is left of the work."""
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    ckpt = checkpoint(tmp_path / "ckpt", b"previous")
    publish(ckpt, b"new")
    assert content(commit.find(ckpt)) == b"new"
    assert sorted(os.listdir(ckpt)) == [names.MANIFEST_NAME, "model.safetensors"]
    assert os.listdir(tmp_path) == ["ckpt"]


@pytest.mark.parametrize("able", [True, False])
def test_a_folder_that_appears_during_a_save_is_not_replaced(
    able: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody makes the target while it is saved for the first time: it stays theirs, and gets the checkpoint."""
    if not able:
        monkeypatch.setattr(commit, "_renameat2", lambda: None)
    ckpt = tmp_path / "ckpt"
    staging = commit.stage(ckpt, "abcdefghijkl")
    (staging / "model.safetensors").write_bytes(b"new")
    entry = Entry("model.safetensors", 3, digest_of_bytes(b"new"))
    commit.complete(staging, ckpt, Manifest((entry,), 1, {}, 3, "abcdefghijkl"))
    ckpt.mkdir()
    number = ckpt.stat().st_ino
    hidden, flush, seen = ckpt / names.JOURNAL_NAME, in_place.flush_folder, list[tuple[Path, bool, bool]]()

    def watched(flushed: Path) -> None:
        flush(flushed)
        seen.append((flushed, hidden.is_dir(), any(hidden.glob("*.committed"))))

    monkeypatch.setattr(in_place, "flush_folder", watched)
    commit.publish(staging, ckpt)
    assert (ckpt, True, False) in seen  # the name of the hidden folder is on disk before the commit is in it
    assert ckpt.stat().st_ino == number
    assert content(commit.find(ckpt)) == b"new"
    assert os.listdir(tmp_path) == ["ckpt"]
    assert not list(ckpt.glob(".*"))


@pytest.mark.parametrize("able", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("there", [True, False], ids=["replaced", "absent"])
def test_a_folder_takes_the_place_of_another(
    able: bool, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new folder stands under the name, the earlier one is gone, and nothing is left beside it."""
    if not able:
        monkeypatch.setattr(commit, "_renameat2", lambda: None)
    target, source = tmp_path / "shards", checkpoint(tmp_path / "new", b"new")
    if there:
        checkpoint(target, b"old", manifest=False)
    commit.replace_folder(source, target)
    assert content(target) == b"new"
    assert found_save(target).whole
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


def test_a_folder_that_cannot_take_a_place_leaves_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system refuses is raised, with both folders as they were."""
    target, source = checkpoint(tmp_path / "shards", b"old"), checkpoint(tmp_path / "new", b"new")
    monkeypatch.setattr(commit, "_rename_with", lambda *_: errno.EACCES)
    with pytest.raises(PermissionError, match="new"):
        commit.replace_folder(source, target)
    assert (content(target), content(source)) == (b"old", b"new")


def test_target_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """A checkpoint does not replace a file."""
    (tmp_path / "ckpt").write_text("mine")
    with pytest.raises(CheckpointError, match="is saved into a folder"):
        commit.stage(tmp_path / "ckpt", "abcdefghijkl")
    assert (tmp_path / "ckpt").read_text() == "mine"
    assert os.listdir(tmp_path) == ["ckpt"]


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_stands_where_a_file_belongs_is_refused_before_anything_changes(
    kind: str, make_run: Callable[..., BareRun], tmp_path: Path
) -> None:
    """A folder under the name of a file, or a link under that of a folder: a named error, the checkpoint as it was."""
    run = make_run(1)
    save_state(run, tmp_path / "ckpt")
    before = (tmp_path / "ckpt" / names.MANIFEST_NAME).read_bytes()
    if kind == "folder":
        (tmp_path / "ckpt" / "pytorch_model.bin").mkdir()
    else:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "ckpt" / "adapter").symlink_to(tmp_path / "elsewhere")
        run.save_state_pre_hooks[0] = lambda models, weights, output_dir: Path(output_dir, "adapter").mkdir()
    with pytest.raises(CheckpointError, match="Move it, or save into another folder"):
        save_state(run, tmp_path / "ckpt", safe_serialization=kind == "link")
    assert (tmp_path / "ckpt" / names.MANIFEST_NAME).read_bytes() == before
    assert not list((tmp_path / "ckpt").glob(".*"))
    load_state(run, tmp_path / "ckpt")


def test_what_others_have_in_a_target_is_not_touched(make_run: Callable[..., BareRun], tmp_path: Path) -> None:
    """Files made, replaced and open during saves, a working folder, modes, group and attributes are as they were."""
    run, ckpt = make_run(1), tmp_path / "ckpt"
    ckpt.mkdir()
    (ckpt / "private").mkdir()
    (ckpt / "private").chmod(0o700)
    os.chown(ckpt, -1, 1234) if os.geteuid() == 0 else None
    ckpt.chmod(0o2770)
    before = ckpt.stat()
    (ckpt / "status").write_text("0")
    with open(ckpt / "log", "a") as log:

        def others(models: list[Any], weights: list[Any], output_dir: str) -> None:
            Path(output_dir, "private").mkdir()
            Path(output_dir, "private", "own.txt").write_text("ours")
            number = len(list(ckpt.glob("new-*")))
            (ckpt / f"new-{number}").write_text("theirs")
            (tmp_path / "status").write_text(str(number))
            os.replace(tmp_path / "status", ckpt / "status")

        run.save_state_pre_hooks[0] = others
        directory = os.open(ckpt, os.O_RDONLY)
        for number in range(3):
            save_state(run, ckpt)
            log.write(f"{number}\n")
            log.flush()
            os.close(os.open(f"made-{number}", os.O_CREAT | os.O_WRONLY, dir_fd=directory))
        os.close(directory)
    after = ckpt.stat()
    assert (ckpt / "log").read_text() == "0\n1\n2\n"
    assert (ckpt / "status").read_text() == "2"
    assert {f"new-{number}" for number in range(3)} | {f"made-{number}" for number in range(3)} < set(os.listdir(ckpt))
    same = ("st_ino", "st_mode", "st_uid", "st_gid")
    assert [getattr(before, name) for name in same] == [getattr(after, name) for name in same]
    assert stat.S_IMODE((ckpt / "private").stat().st_mode) == 0o700


@pytest.mark.parametrize("links", [True, False])
def test_what_is_replaced_keeps_its_readers(
    links: bool, make_run: Callable[..., BareRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the checkpoint that only its owner may read is so in the next one, and at no time else."""
    run, ckpt = make_run(1), tmp_path / "ckpt"
    save_state(run, ckpt)
    (ckpt / "optimizer.bin").chmod(0o600)
    seen: list[int] = []
    if not links:
        monkeypatch.setattr(os, "link", no_links)

    def look(models: list[Any], weights: list[Any], output_dir: str) -> None:
        seen.append(stat.S_IMODE(Path(output_dir).parent.stat().st_mode))

    run.save_state_pre_hooks[0] = look
    save_state(run, ckpt)
    assert seen == [0o700]
    assert stat.S_IMODE((ckpt / "optimizer.bin").stat().st_mode) == 0o600
    assert stat.S_IMODE((ckpt / "scheduler.bin").stat().st_mode) != 0o600


def test_only_unchanged_files_of_the_save_before_are_deleted(make_run: Callable[..., BareRun], tmp_path: Path) -> None:
    """A part that is gone from the run goes; a file that somebody else put under its name stays, and is not read."""
    run, ckpt = make_run(1), tmp_path / "ckpt"
    save_state(run, ckpt, safe_serialization=False)
    (ckpt / "pytorch_model.bin").write_bytes(b"somebody else's")
    (ckpt / "optimizer_7.bin").write_bytes(b"never listed")
    run.custom_objects.clear()
    save_state(run, ckpt)
    assert not (ckpt / "custom_checkpoint_0.pkl").exists()
    assert (ckpt / "pytorch_model.bin").read_bytes() == b"somebody else's"
    assert (ckpt / "optimizer_7.bin").read_bytes() == b"never listed"
    load_state(run, ckpt)


def test_a_journal_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    """Somebody's folder with a commit whose list of what leaves climbs out: refused, and nothing is deleted."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    ckpt = lay_inside(tmp_path, "previous", "committed", "new")
    found = victim.stat()
    listed = {"../victim": [found.st_ino, found.st_size, found.st_mtime_ns]}
    (inside(ckpt, "committed") / ".accel-stale.json").write_text(json.dumps(listed))
    with pytest.raises(UnsafeCheckpointError, match="leads outside"):
        commit.recover(ckpt)
    assert victim.read_text() == "mine"


@pytest.mark.slow
def test_a_failing_disk_says_which_checkpoint_stands(
    make_run: Callable[..., BareRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flush of a folder fails at each step of a save: what the error says is what loading finds."""
    run, flush = make_run(1), commit.flush_folder
    said: set[str] = set()
    for fresh in (True, False):
        for failing in range(1, 12):
            ckpt = tmp_path / f"ckpt-{fresh}-{failing}"
            if not fresh:
                run.step = 1
                save_state(run, ckpt)
            left = [failing]

            def broken(place: Path, left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] == 0:
                    raise OSError(errno.EIO, "Input/output error")
                flush(place)

            run.step = 2
            with monkeypatch.context() as patch:
                patch.setattr(commit, "flush_folder", broken)
                patch.setattr(in_place, "flush_folder", broken)
                try:
                    save_state(run, ckpt)
                    continue
                except CheckpointError as error:
                    message = str(error)
            new = "new checkpoint" in message
            said.add(f"{fresh} {new}")
            other = make_run(3)
            if new or not fresh:
                load_state(other, ckpt)
                assert other.step == (2 if new else 1), message
            else:
                assert commit.find(ckpt) is None, message
    assert said == {"True True", "True False", "False True", "False False"}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount")
def test_a_mounted_folder_in_a_target_is_not_touched(make_run: Callable[..., BareRun], tmp_path: Path) -> None:
    """A volume inside the target stays where it is, with what it holds; a hook may write into it."""
    run, volume = make_run(1), tmp_path / "ckpt" / "tb"
    volume.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(volume)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("needs to mount a tmpfs")
    try:
        (volume / "events").write_text("mine")

        def hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
            Path(output_dir, "tb").mkdir()
            Path(output_dir, "tb", "own.txt").write_text("ours")

        run.save_state_pre_hooks[0] = hook
        for _ in range(2):
            save_state(run, tmp_path / "ckpt")
            assert os.path.ismount(volume)
            assert sorted(os.listdir(volume)) == ["events", "own.txt"]
        load_state(run, tmp_path / "ckpt")
    finally:
        subprocess.run(["umount", str(volume)], check=True)
    assert os.listdir(tmp_path) == ["ckpt"]


def test_a_save_does_not_look_at_foreign_files(
    make_run: Callable[..., BareRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target is never listed by a save into a checkpoint, so what lies in it costs nothing."""
    run, ckpt = make_run(1), tmp_path / "ckpt"
    save_state(run, ckpt)
    listed: list[str] = []
    for name in ("listdir", "scandir"):
        original = getattr(os, name)

        def watched(path: Any = ".", original: Any = original) -> Any:
            listed.append(os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path))
            return original(path)

        monkeypatch.setattr(os, name, watched)
    save_state(run, ckpt)
    assert str(tmp_path) in listed
    assert str(ckpt) not in listed


def test_pruning_keeps_the_newest_and_the_limit(tmp_path: Path) -> None:
    """The oldest numbered checkpoints go; the newest stays whatever the limit."""
    for number in (2, 9, 10, 11):
        checkpoint(tmp_path / f"checkpoint_{number}", b"x")
    (tmp_path / "checkpoint_best").mkdir()
    commit.prune(tmp_path / "checkpoint_11", 2)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_10", "checkpoint_11", "checkpoint_best"]
    commit.prune(tmp_path / "checkpoint_11", 0)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_11", "checkpoint_best"]


def test_pruning_leaves_what_is_not_ours(tmp_path: Path) -> None:
    """Folders that only look like checkpoints are not counted and stay, and so do others' files in a checkpoint."""
    for number in (1, 2, 3):
        checkpoint(tmp_path / f"checkpoint_{number}", b"x")
    (tmp_path / "checkpoint_1" / "notes.txt").write_text("mine")
    for name in ("checkpoint_0001", "checkpoint_0", "checkpoint_1_backup", "checkpoint_²"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("mine")
    commit.prune(tmp_path / "checkpoint_3", 1)
    assert sorted(os.listdir(tmp_path)) == sorted(
        ["checkpoint_0", "checkpoint_0001", "checkpoint_1", "checkpoint_1_backup", "checkpoint_3", "checkpoint_²"]
    )
    assert os.listdir(tmp_path / "checkpoint_1") == ["notes.txt"]
    assert (tmp_path / "checkpoint_0001" / "model.safetensors").read_text() == "mine"


@pytest.mark.parametrize("shared", [False, True])
def test_pruning_that_was_interrupted_is_finished(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at any deletion, it leaves nothing that is loaded; the next save or pruning deletes the rest."""
    for failing in range(2):
        place = tmp_path / str(failing)
        place.mkdir()
        for number in (1, 2):
            checkpoint(place / f"checkpoint_{number}", b"x")
        if shared:
            (place / "checkpoint_1" / "notes.txt").write_text("mine")
        unlink, left = os.unlink, [failing]

        def broken(path: Any, left: list[int] = left, unlink: Any = unlink, **kwargs: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            unlink(path, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", broken)
            with pytest.raises(KeyboardInterrupt):
                commit.prune(place / "checkpoint_2", 1)
        assert latest(place) == place / "checkpoint_2"
        assert commit.find(place / "checkpoint_1") is None or (shared and not failing)
        for target in commit.unrecovered(place):
            commit.recover(target)
        commit.prune(place / "checkpoint_2", 1)
        assert sorted(os.listdir(place)) == (["checkpoint_1"] if shared else []) + ["checkpoint_2"]
        assert not shared or os.listdir(place / "checkpoint_1") == ["notes.txt"]


def test_latest_is_the_highest_complete_number(tmp_path: Path) -> None:
    """Half-written and deleted checkpoints are passed over; numbers are compared as numbers."""
    checkpoint(tmp_path / "checkpoint_9", b"nine")
    checkpoint(tmp_path / "checkpoint_10", b"ten")
    checkpoint(tmp_path / ".tmp-checkpoint_11-abcdefghijkl", b"eleven", manifest=False)
    checkpoint(tmp_path / ".gone-checkpoint_12-abcdefghijkl", b"twelve")
    assert content(commit.find(latest(tmp_path))) == b"ten"
    checkpoint(tmp_path / ".tmp-checkpoint_13-abcdefghijkl", b"thirteen")
    assert content(commit.find(latest(tmp_path))) == b"thirteen"
    with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint_<number>"):
        latest(tmp_path / "nowhere")


def test_leftovers_of_other_targets_are_left_alone(tmp_path: Path) -> None:
    """Another run that saves in the same directory is not disturbed."""
    other = checkpoint(tmp_path / ".tmp-ckpt-b-abcdefghijkl", b"other", manifest=False)
    commit.recover(tmp_path / "ckpt")
    assert other.is_dir()


def test_leftovers_that_cannot_be_deleted_do_not_forbid_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be deleted beside a target, as a volume is in it, is left where it is, with a warning."""
    ckpt = checkpoint(tmp_path / "ckpt", b"previous")
    (tmp_path / ".gone-ckpt-abcdefghijkl" / "tb").mkdir(parents=True)
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path).endswith("tb"))
    commit.recover(ckpt)
    publish(ckpt, b"new")
    assert content(commit.find(ckpt)) == b"new"
    assert (tmp_path / ".gone-ckpt-abcdefghijkl" / "tb").is_dir()
    assert "could not be deleted" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("length", [237, 255])
def test_names_as_long_as_the_filesystem_takes_them(
    length: int, make_run: Callable[..., BareRun], tmp_path: Path
) -> None:
    """A save makes names beside a long name that are no longer than it may be, and recovers by them."""
    run, ckpt = make_run(1), tmp_path / ("\u00e9" * (length // 2)).ljust(length - length // 2, "x")
    assert len(os.fsencode(ckpt.name)) == length
    for _ in range(2):
        save_state(run, ckpt)
    load_state(run, ckpt)
    ckpt.rename(commit.sibling_path(ckpt, commit.STAGING, "abcdefghijkl"))
    load_state(run, ckpt)
    save_state(run, ckpt)
    assert os.listdir(tmp_path) == [ckpt.name]
