"""What a save leaves on disk at every instant, and what loading and the next save make of it."""

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from runs import build

from accel_core.checkpoint import commit, names
from accel_core.checkpoint.digest import digest_of_bytes
from accel_core.checkpoint.load import load_state
from accel_core.checkpoint.local import LocalStorage
from accel_core.checkpoint.manifest import Entry, Manifest
from accel_core.checkpoint.run import BareRun
from accel_core.checkpoint.save import Transaction, save_state
from accel_core.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError, UnsafeCheckpointError

PAGE = Path(__file__).parents[5] / "docs" / "concepts" / "checkpoints.md"
COMMITTED = f"{names.HIDDEN}committed"
STAGED = f"{names.HIDDEN}abcdefghijkl"
pytestmark = pytest.mark.usefixtures("fresh_state")


class State(NamedTuple):
    """A row of the page's table: what is under public names, what is hidden, and what follows."""

    public: str
    staged: bool
    committed: bool
    loads: str
    next_save: str


def states() -> list[State]:
    """Return the rows of the page's table."""
    table = PAGE.read_text().partition("| under public names |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    assert len(rows) == 7, rows
    return [State(public, staged == "yes", committed == "yes", *after) for public, staged, committed, *after in rows]


STATES = states()


def write(folder: Path, word: bytes, *, manifest: bool = True) -> Path:
    """Make a folder with one file and, unless it is to be incomplete, a manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(word)
    if manifest:
        entry = Entry("model.safetensors", len(word), digest_of_bytes(word))
        Manifest((entry,), 1, {}, 1, names.fresh_id()).write(folder)
    return folder


def content(folder: Path | None) -> bytes | None:
    """Return what the one file of a folder holds."""
    return None if folder is None else (folder / "model.safetensors").read_bytes()


def publish(target: Path, word: bytes) -> None:
    """Save a file into a target by all the steps."""
    identity = names.fresh_id()
    staging = commit.stage(target, identity)
    (staging / "model.safetensors").write_bytes(word)
    entry = Entry("model.safetensors", len(word), digest_of_bytes(word))
    LocalStorage(BareRun().world, target, staging=staging).commit(Manifest((entry,), 1, {}, 3, identity))


def lay_out(target: Path, state: State) -> None:
    """Make a state on disk."""
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    if state.public == "a checkpoint":
        write(target, b"previous")
    elif state.public == "anything":  # a mixture: a file of the new save, and the manifest gone
        (target / "model.safetensors").write_bytes(b"new")
        (target / "optimizer.bin").write_bytes(b"previous")
    elif state.public == "files without their manifest":
        write(target, b"previous", manifest=False)
        (target / names.PROGRESS_NAME).write_text("{}")
    if state.staged:
        write(target / STAGED, b"staged")
    if state.committed:
        write(target / COMMITTED, b"new")
        plan = {"stale": ["optimizer.bin"], "last": [names.MANIFEST_NAME]}
        (target / COMMITTED / f"{names.HIDDEN}plan.json").write_text(json.dumps(plan))


LOADED = {"nothing": None, "that checkpoint": b"previous", "the committed save": b"new", "an error": None}


@pytest.mark.parametrize("state", STATES)
def test_loading_and_the_next_save_follow_the_table(state: State, tmp_path: Path) -> None:
    """What is found in each state of the page's table, without a change on disk, and what a save makes of it."""
    target = tmp_path / "ckpt"
    lay_out(target, state)
    before = sorted(target.rglob("*"))
    assert content(commit.find(target)) == LOADED[state.loads]
    assert sorted(target.rglob("*")) == before
    if state.loads == "an error":
        with pytest.raises(CheckpointDamagedError, match="has lost its manifest"):
            Manifest.read(commit.standing(target))
    commit.recover(target)
    assert content(commit.find(target)) == LOADED[state.loads]
    assert not list(target.glob(f"{names.HIDDEN}*"))
    publish(target, b"next")
    assert content(commit.find(target)) == b"next"
    assert sorted(os.listdir(target)) == [names.MANIFEST_NAME, "model.safetensors", "notes.txt"]


def events_of_a_save(run: BareRun, ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Save, and return what was written, flushed and renamed, in order; hidden folders have no id."""
    events: list[tuple[str, str]] = []

    def watch(name: str, event: str, *, opened: bool) -> None:
        original = getattr(os, name)

        def watched(first: Any, *rest: Any, **options: Any) -> Any:
            result = original(first, *rest, **options)
            path = os.readlink(f"/proc/self/fd/{first}") if opened else str(rest[0])
            inner = os.path.relpath(path, ckpt.parent)
            events.append((event, re.sub(rf"{re.escape(names.HIDDEN)}[a-z]{{12}}", "staging", inner)))
            return result

        patch.setattr(os, name, watched)

    with monkeypatch.context() as patch:
        watch("fsync", "flush", opened=True)
        watch("write", "write", opened=True)
        watch("rename", "rename", opened=False)
        watch("replace", "put", opened=False)
        save_state(run, ckpt)
    return events


def test_everything_reaches_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, then the manifest, then their folders are flushed before the commit; then its name, and the places."""
    run, ckpt = build(1), tmp_path / "new" / "ckpt"

    def hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        Path(output_dir, "adapter").mkdir()
        Path(output_dir, "adapter", "own.txt").write_text("own")

    run.save_state_pre_hooks[0] = hook
    for events in (events_of_a_save(run, ckpt, monkeypatch), events_of_a_save(run, ckpt, monkeypatch)):
        files = {entry.name for entry in Manifest.read(ckpt).entries}  # type: ignore[union-attr]
        assert {"adapter/own.txt", "model.safetensors", "optimizer.bin"} < files
        manifest = events.index(("write", f"ckpt/staging/{names.MANIFEST_NAME}"))
        step = events.index(("rename", f"ckpt/{COMMITTED}"))
        for name in files:
            writes = [at for at, event in enumerate(events) if event == ("write", f"ckpt/staging/{name}")]
            assert max(writes, default=-1) < events.index(("flush", f"ckpt/staging/{name}")) < manifest
        last = (f"ckpt/staging/{names.MANIFEST_NAME}", "ckpt/staging/adapter", "ckpt/staging")
        order = [events.index(("flush", name)) for name in last]
        assert manifest < order[0] < order[1] < order[2] < step
        placed = events[step + 1 :]
        assert placed[0] == ("flush", "ckpt")
        public = placed.index(("put", f"ckpt/{names.MANIFEST_NAME}"))
        assert {("put", f"ckpt/{name}") for name in files} <= set(placed[:public])
        # Only when the places are flushed, the hidden folder is given up.
        assert public < placed.index(("flush", "ckpt"), 1) < placed.index(("rename", "ckpt/staging"))


@pytest.mark.parametrize("stands", [False, True])
@pytest.mark.parametrize("silent", ["finish", "_commit"])
def test_a_save_that_another_overtook_takes_no_place(
    silent: str, stands: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a process that is silent in a save, while another one saves there, the older state is refused in the end."""
    ckpt, go_on = tmp_path / "ckpt", getattr(Transaction, silent)
    if stands:
        save_state(build(3), ckpt)

    def late(*args: Any, **kwargs: Any) -> object:
        monkeypatch.undo()
        save_state(build(2), ckpt)
        return go_on(*args, **kwargs)

    monkeypatch.setattr(Transaction, silent, late)
    with pytest.raises(CheckpointError, match=r"No such file|is gone|have to list what they write"):
        save_state(build(1), ckpt)
    loaded = build(9)
    load_state(loaded, ckpt)
    assert loaded.step == 2
    assert not list(ckpt.glob(f"{names.HIDDEN}*"))


def test_a_failed_save_deletes_its_own_folder_alone(tmp_path: Path) -> None:
    """A save that fails leaves another one alone that has begun in the same folder."""
    own, other = tmp_path / STAGED, tmp_path / f"{names.HIDDEN}mnopqrstuvwx"
    own.mkdir()
    other.mkdir()
    commit.clear(own)
    assert os.listdir(tmp_path) == [other.name]


@pytest.mark.parametrize("links", [True, False])
def test_new_files_take_places_with_and_without_links(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a filesystem has no hard links, files are copied; nothing is left of the work."""

    def no_links(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    ckpt = write(tmp_path / "ckpt", b"previous")
    publish(ckpt, b"new")
    assert content(commit.find(ckpt)) == b"new"
    assert sorted(os.listdir(ckpt)) == [names.MANIFEST_NAME, "model.safetensors"]


def test_files_of_others_in_a_target_are_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files made, replaced and open during saves are as they were, and so is the folder, in which a process works."""
    run, ckpt = build(1), tmp_path / "ckpt"
    ckpt.mkdir()
    ckpt.chmod(0o2770)
    monkeypatch.chdir(ckpt)
    before = ckpt.stat()
    with open(ckpt / "log", "a") as log:

        def others(models: list[Any], weights: list[Any], output_dir: str) -> None:
            (ckpt / f"new-{len(list(ckpt.glob('new-*')))}").write_text("theirs")

        run.save_state_pre_hooks[0] = others
        for number in range(3):
            save_state(run, ".")
            log.write(f"{number}\n")
            log.flush()
    assert Path("log").read_text() == "0\n1\n2\n"
    assert {"new-0", "new-1", "new-2"} < set(os.listdir(ckpt))
    after = ckpt.stat()
    assert (before.st_ino, stat.S_IMODE(before.st_mode)) == (after.st_ino, stat.S_IMODE(after.st_mode))


def test_a_plan_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    """Somebody's folder with a commit whose list of what leaves climbs out: refused, and nothing is deleted."""
    (tmp_path / "victim").write_text("mine")
    ckpt = tmp_path / "ckpt"
    lay_out(ckpt, next(state for state in STATES if state.committed))
    plan = ckpt / COMMITTED / f"{names.HIDDEN}plan.json"
    plan.write_text(json.dumps({"stale": ["../victim"], "last": []}))
    with pytest.raises(UnsafeCheckpointError, match="leads outside"):
        commit.recover(ckpt)
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True])
def test_a_failing_disk_says_which_checkpoint_stands(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flush of a folder fails at each step of a save: what the error says is what loading finds."""
    run, flush, said = build(1), commit.flush_folder, set[bool]()
    for failing in range(1, 9):
        ckpt, left = tmp_path / f"ckpt-{failing}", [failing]
        if there:
            run.step = 1
            save_state(run, ckpt)

        def broken(place: Path, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.EIO, "Input/output error")
            flush(place)

        run.step = 2
        with monkeypatch.context() as patch:
            patch.setattr(commit, "flush_folder", broken)
            try:
                save_state(run, ckpt)
                continue
            except CheckpointError as error:
                message = str(error)
        new = "new checkpoint" in message
        said.add(new)
        if new or there:
            other = build(3)
            load_state(other, ckpt)
            assert other.step == (2 if new else 1), message
        else:
            assert commit.find(ckpt) is None, message
    assert said == {True, False}


def latest(directory: Path) -> Path:
    """Return the newest complete checkpoint of a series."""
    return LocalStorage(BareRun().world, directory).newest()


def test_pruning_keeps_the_newest_and_the_limit(tmp_path: Path) -> None:
    """The oldest numbered checkpoints go; the newest stays whatever the limit."""
    for number in (2, 9, 10, 11):
        write(tmp_path / f"checkpoint_{number}", b"x")
    (tmp_path / "checkpoint_best").mkdir()
    commit.prune(tmp_path / "checkpoint_11", 2)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_10", "checkpoint_11", "checkpoint_best"]
    commit.prune(tmp_path / "checkpoint_11", 0)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_11", "checkpoint_best"]


def test_pruning_leaves_files_and_folders_of_others(tmp_path: Path) -> None:
    """What only looks like a checkpoint is not counted and stays, but what a killed save left; others' files stay."""
    for number in (3, 4, 5):
        write(tmp_path / f"checkpoint_{number}", b"x")
    (tmp_path / "checkpoint_3" / "notes.txt").write_text("mine")
    strange = ("checkpoint_0001", "checkpoint_0", "checkpoint_1_backup", "checkpoint_²")
    for name in strange:
        write(tmp_path / name, b"mine", manifest=False)
    (tmp_path / "checkpoint_1").mkdir()
    write(tmp_path / "checkpoint_2" / STAGED, b"half", manifest=False)
    commit.prune(tmp_path / "checkpoint_5", 1)
    assert sorted(os.listdir(tmp_path)) == sorted([*strange, "checkpoint_1", "checkpoint_3", "checkpoint_5"])
    assert os.listdir(tmp_path / "checkpoint_3") == ["notes.txt"]


def test_the_latest_is_the_highest_complete_number(tmp_path: Path) -> None:
    """Saves that were not committed and damaged ones are passed over; numbers are compared as numbers."""
    write(tmp_path / "checkpoint_9", b"nine")
    write(tmp_path / "checkpoint_10", b"ten")
    write(tmp_path / "checkpoint_11" / STAGED, b"eleven")
    (write(tmp_path / "checkpoint_12", b"twelve") / "model.safetensors").unlink()
    assert latest(tmp_path) == tmp_path / "checkpoint_10"
    write(tmp_path / "checkpoint_13" / COMMITTED, b"thirteen")
    assert content(commit.standing(latest(tmp_path))) == b"thirteen"
    with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint_<number>"):
        latest(tmp_path / "nowhere")


def test_a_truncated_manifest_is_not_complete(tmp_path: Path) -> None:
    """A manifest of which a part reached the disk proves nothing."""
    ckpt = write(tmp_path / "ckpt", b"new")
    raw = (ckpt / names.MANIFEST_NAME).read_bytes()
    for length in range(len(raw)):
        (ckpt / names.MANIFEST_NAME).write_bytes(raw[:length])
        assert commit.find(ckpt) is None
    (ckpt / names.MANIFEST_NAME).write_bytes(raw)
    assert commit.find(ckpt) == ckpt
