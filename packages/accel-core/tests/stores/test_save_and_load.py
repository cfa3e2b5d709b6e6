"""Saving whole runs to stores and loading them: several ranks, series, other writers, caches, what is refused."""

import errno
import itertools
import os
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import build, set_to, stored, values
from store_server import KIND, SCHEME, FaultyProxy, settings

from accel_core.accelerator import Accelerator
from accel_core.checkpoint import background
from accel_core.checkpoint.address import Address, address_of
from accel_core.checkpoint.digest import HashingFile
from accel_core.checkpoint.load import load_state
from accel_core.checkpoint.remote import commits, store
from accel_core.checkpoint.remote.scratch import Scratch
from accel_core.checkpoint.remote.storage import RemoteStorage
from accel_core.checkpoint.save import save_state
from accel_core.comm.objects import gather_object
from accel_core.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    MissingDependencyError,
)
from accel_core.plugins.project import ProjectConfiguration
from accel_core.process.world import ensure
from accel_core.state import reset_all
from accel_testing import world


def objects(address: str) -> list[str]:
    """Return the names of all objects at an address, without folders of saves."""
    import fsspec

    fs, root = fsspec.core.url_to_fs(address, use_listings_cache=False)
    found = fs.find(root, detail=True)
    return sorted(name.rpartition("/")[2] for name, each in found.items() if each["type"] == "file")


def place(address: str) -> store.Store:
    """Return the place of an address."""
    found = address_of(address)
    assert isinstance(found, Address)
    return store.Store(found)


def newest(at: store.Store) -> commits.Commit:
    """Return the commit that counts at a place where there is one."""
    found = commits.newest(at)
    assert found is not None
    return found


def whole(series: str) -> list[int]:
    """Return the numbers of a series that have a commit."""
    at = place(series)
    return [number for number in commits.numbered(at) if commits.newest(at.below(f"checkpoint_{number}"))]


S3_ALONE = pytest.mark.skipif(SCHEME != "s3", reason="speaks S3 itself")
pytestmark = pytest.mark.usefixtures("fresh_state")


@pytest.fixture(params=["s3", "memory"])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an address in each of two stores."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if request.param == "s3":
        return str(request.getfixturevalue("bucket")) + "/run"
    return f"memory://{tmp_path.name}/run"  # in this process, and no other test has it


def test_a_run_comes_back_from_a_store(address: str) -> None:
    """What was saved to an address is loaded from it, into the same values, and the paths that come back say where."""
    given = save_state(build(3.0), address)
    assert str(given) == address
    run = build(9.0)
    report = load_state(run, given)
    assert values(run) == {3.0}
    assert (str(report.folder), report.findings) == (address, [])


def test_a_series_keeps_the_newest(address: str) -> None:
    """Numbered checkpoints go to the project's address, `total_limit` of them stay, and the newest is loaded."""
    project = {"project_dir": address, "automatic_checkpoint_naming": True, "total_limit": 2}
    run = build(1.0, **project)
    for value in (1.0, 2.0, 3.0):
        set_to(run, value)
        given = save_state(run)
    assert str(given) == f"{address}/checkpoints/checkpoint_2"
    assert whole(f"{address}/checkpoints") == [1, 2]
    again = build(9.0, **project)
    assert str(load_state(again).folder) == str(given)
    assert (values(again), again.project.iteration) == ({3.0}, 3)
    save_state(again)
    assert whole(f"{address}/checkpoints") == [2, 3]


def test_the_folder_of_a_save_is_an_ordinary_checkpoint(address: str, tmp_path: Path) -> None:
    """Copied to a disk with the store's own tool, it is loaded like any folder."""
    import fsspec

    save_state(build(3.0), address)
    commit = newest(place(address))
    fs, root = fsspec.core.url_to_fs(f"{address}/{commit.folder}")
    fs.get(root, str(tmp_path / "copied"), recursive=True)
    assert stored(tmp_path / "copied") == {3.0}


def test_a_save_in_the_background_reaches_the_store(bucket: str) -> None:
    """`blocking=False` uploads while the run goes on, with the values of the call."""
    run = build(4.0)
    handle = save_state(run, f"{bucket}/run", blocking=False)
    set_to(run, 5.0)
    assert isinstance(handle, background.Handle)
    assert str(handle.wait()) == f"{bucket}/run"
    assert stored(f"{bucket}/run") == {4.0}


def test_nothing_is_left_of_the_save_before(address: str) -> None:
    """After a save over another one, the address holds one commit, one manifest and the files of the manifest."""
    run = build(1.0)
    save_state(run, address)
    first = objects(address)
    set_to(run, 2.0)
    save_state(run, address)
    assert len(objects(address)) == len(first)
    assert stored(address) == {2.0}


def test_the_second_of_two_writers_is_refused(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save during which another one committed is refused, whenever that was, and the other one stands."""
    run, other = build(1.0), build(1.0)
    save_state(run, f"{bucket}/run")
    for step in ("write", "sizes", "commit"):
        set_to(other, 7.0 + len(step))
        before = getattr(RemoteStorage, step)

        def meanwhile(self: RemoteStorage, *given: object, before: object = before, step: str = step) -> object:
            monkeypatch.setattr(RemoteStorage, step, before)
            save_state(other, f"{bucket}/run")
            return before(self, *given)  # type: ignore[operator]

        monkeypatch.setattr(RemoteStorage, step, meanwhile)
        with pytest.raises(CheckpointError, match=r"Another writer saved to|have to list what they write"):
            save_state(run, f"{bucket}/run")
        assert stored(f"{bucket}/run") == {7.0 + len(step)}
        assert len([name for name in objects(f"{bucket}/run") if name == "model.safetensors"]) == 1


@world(2, quiet=15)
def save_on_ranks(variables: dict[str, str], address: str, temporary: str) -> None:
    """Save and load on two ranks, whose random states are their own; each says what it moved."""
    os.environ.update(variables)
    tempfile.tempdir, store._PAUSE = temporary, 0.0
    run = build(3.0)
    rank = run.world.rank
    torch.manual_seed(rank + 100)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(rank + 100))
    save_state(run, address)
    again = build(9.0)
    report = load_state(again, address)
    assert values(again) == {3.0}
    assert torch.equal(torch.rand(1), expected)
    assert report.world_size == 2
    handle = save_state(run, address, blocking=False)
    assert isinstance(handle, background.Handle)
    handle.wait()


def weights_in(s3: FaultyProxy, verb: str) -> list[str]:
    """Return the requests for weights among those that were seen, with verbs that begin so."""
    paths = [path.removesuffix("?alt=media") for method, path, _ in s3.seen if method.startswith(verb)]
    # gcsfs asks what a file is before and after it is fetched.
    return [path for path in paths if path.endswith(".safetensors") and not path.startswith("/storage/v1/b/")]


def test_ranks_save_and_load_together(s3: FaultyProxy, bucket: str, tmp_path: Path) -> None:
    """Each rank uploads its own files, and each file is fetched once for all ranks of a machine."""
    save_on_ranks(settings(s3), f"{bucket}/run", str(tmp_path))
    found = objects(f"{bucket}/run")
    assert {"random_states_0.pkl", "random_states_1.pkl", "model.safetensors"} <= set(found)
    assert len(weights_in(s3, "GET")) == 1
    assert list((tmp_path / f"accel-{os.getuid()}").iterdir()) == []


@world(2, quiet=15)
def save_on_machines(variables: dict[str, str], address: str, temporary: str, clash: bool) -> None:
    """Save and load on two ranks, each on a machine of its own, with files that hooks write on both."""
    os.environ.update(variables)
    rank = ensure().rank
    store._PAUSE, tempfile.tempdir = 0.0, f"{temporary}/{rank}"
    os.mkdir(f"{temporary}/{rank}")
    name = "note.txt" if clash else f"note_{rank}.txt"
    seen: list[list[str]] = []
    runs = [build(3.0), build(9.0), build(9.0)]
    for run in runs:
        run.world = replace(run.world, local_rank=0, local_size=1)
        run.save_state_pre_hooks[0] = lambda models, weights, folder: Path(folder, name).write_text(f"{rank}")
        run.load_state_pre_hooks[0] = lambda models, folder: seen.append(sorted(os.listdir(folder)))
    if clash:
        with pytest.raises(CheckpointError, match="have to list what they write"):
            save_state(runs[0], address)
        return
    save_state(runs[0], address)
    load_state(runs[1], address)
    assert values(runs[1]) == {3.0}
    assert {"note_0.txt", "note_1.txt", "random_states_0.pkl", "random_states_1.pkl"} <= set(seen[0])
    # Without hooks, which may read anything, the random states of the other rank are not fetched, and not there.
    runs[2].load_state_pre_hooks.clear()
    fetch, kept = RemoteStorage.fetch, list[str]()

    def look(self: RemoteStorage, *given: Any) -> None:
        fetch(self, *given)
        kept.extend(path.name for path in self.staging.glob("random_states_*"))

    RemoteStorage.fetch = look  # type: ignore[method-assign]  # the process ends with the test
    load_state(runs[2], address)
    assert values(runs[2]) == {3.0}
    assert kept == [f"random_states_{rank}.pkl"]


def test_machines_share_nothing_but_the_store(s3: FaultyProxy, bucket: str, tmp_path: Path) -> None:
    """Ranks of machines whose disks the others do not see save one checkpoint, each its own files, and load it."""
    save_on_machines(settings(s3), f"{bucket}/run", str(tmp_path), False)
    assert "1.json" in objects(f"{bucket}/run")  # the list of a rank's own files
    assert len(weights_in(s3, "P")) == 1
    for rank in (0, 1):
        assert list((tmp_path / str(rank) / f"accel-{os.getuid()}").iterdir()) == []
    (tmp_path / "clash").mkdir()
    save_on_machines(settings(s3), f"{bucket}/clash", str(tmp_path / "clash"), True)
    assert objects(f"{bucket}/clash") == []


@world(2, quiet=15)
def fail_on_one_rank(variables: dict[str, str], address: str, temporary: str) -> None:
    """Save where one rank has no credentials: all ranks raise the same."""
    os.environ.update(variables)
    tempfile.tempdir, store._PAUSE = temporary, 0.0
    if ensure().rank == 1:
        del os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    os.environ["HOME"] = temporary
    with pytest.raises(ConfigurationError) as caught:
        save_state(build(5.0), address)
    assert "There are no credentials for the store" in str(caught.value)
    assert len(set(gather_object([str(caught.value)]))) == 1


@S3_ALONE
def test_ranks_agree_on_what_fails_on_one(s3: FaultyProxy, bucket: str, tmp_path: Path) -> None:
    """A rank that cannot write makes the save fail on all ranks, with the same error and nothing committed."""
    save_state(build(1.0), f"{bucket}/run")
    fail_on_one_rank(settings(s3), f"{bucket}/other", str(tmp_path))
    assert objects(f"{bucket}/other") == []


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("s3x://bucket/run", ConfigurationError, "Protocol not known: s3x"),
        ("abfs://bucket/run", MissingDependencyError, "adlfs"),
        ("s3://bucket/../run", ConfigurationError, "without '..'"),
        ("s3://", ConfigurationError, "a scheme, a bucket"),
        ("simplecache::s3://bucket/run", ConfigurationError, "several schemes"),
    ],
)
def test_addresses_that_cannot_be_are_refused(
    given: str, error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address that no store can have is refused by name, and no folder of that name is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(store, "_PAUSE", 0.0)
    with pytest.raises(error, match=words):
        save_state(build(1.0), given)
    with pytest.raises((error, CheckpointNotFoundError)):
        load_state(build(1.0), given)
    assert [each.name for each in tmp_path.iterdir() if not each.name.startswith("accel-")] == []


def test_fsspec_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fsspec, an address is refused with what to install."""
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'accel-core\[remote\]'"):
        save_state(build(1.0), "s3://bucket/run")


def test_a_bucket_that_is_not_there_is_named(s3: FaultyProxy) -> None:
    """Saving to or loading from a bucket that nobody made says so."""
    # gcsfs lists nothing in a bucket that is not there.
    for call in (save_state, load_state) if SCHEME == "s3" else (save_state,):
        with pytest.raises(ConfigurationError, match=f"The bucket of '{SCHEME}://nobody-made-it/run' is not there"):
            call(build(1.0), f"{SCHEME}://nobody-made-it/run")


def test_the_accelerator_probes_a_project_in_a_store(s3: FaultyProxy, bucket: str) -> None:
    """What cannot be saved to is refused before the first step; trackers are given no address for their files."""
    cases = {f"{SCHEME}://nobody-made-it/run": "The bucket of", "s3x://bucket/run": "Protocol not known"}
    if KIND == "seaweedfs":  # which makes a bucket where one lacks
        del cases["s3://nobody-made-it/run"]
    for address, words in cases.items():
        project = ProjectConfiguration(address, automatic_checkpoint_naming=True)
        with pytest.raises(ConfigurationError, match=words):
            Accelerator(cpu=True, project_config=project)
        reset_all()
    project = ProjectConfiguration(f"{bucket}/run", automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=project)
    assert accelerator.logging_dir is None
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    before = model.weight.detach().clone()
    given = accelerator.save_state()
    with torch.no_grad():
        model.weight.zero_()
    report = accelerator.load_state()
    assert (str(report.folder), torch.equal(model.weight, before)) == (str(given), True)


@pytest.mark.parametrize(("denied", "doing"), [("P", "Writing"), ("DELETE", "Deleting"), ("GET", "Listing")])
def test_what_is_not_allowed_is_found_before_anything_is_staged(
    s3: FaultyProxy, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denied: str, doing: str
) -> None:
    """Writing, deleting and listing are tried with a small object before anything is collected."""
    count = s3.count
    monkeypatch.setattr(s3, "count", lambda verb, *rest: "denied" if verb.startswith(denied) else count(verb, *rest))
    with pytest.raises(ConfigurationError, match=f"(?s){doing} .* is not allowed.*the right to list, read, write"):
        save_state(build(1.0), f"{bucket}/run")
    assert not (tmp_path / f"accel-{os.getuid()}").exists()


class Unauthorized(Exception):
    """What gcsfs and adlfs raise: an error with the status of the answer."""

    code = 401


@pytest.mark.parametrize(
    ("error", "words"),
    [(OSError("Forbidden: b/run\nno right"), "is not allowed"), (Unauthorized("x"), "There are no credentials")],
)
def test_other_libraries_ways_to_refuse_are_known(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What will not pass is named at once, where a library has no error of its own for it."""
    calls = itertools.count()

    def refuse(self: object, path: str, value: bytes, mode: str = "overwrite") -> None:
        next(calls)
        raise error

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.pipe_file", refuse)
    with pytest.raises(ConfigurationError, match=words):
        save_state(build(1.0), f"memory://{tmp_path.name}/run")
    assert next(calls) == 1


def test_a_library_that_takes_the_mode_unnamed_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library of abfs:// lists the flag that fsspec's mode sets, and not the mode."""
    kind = "fsspec.implementations.memory.MemoryFileSystem.pipe_file"
    put = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem.pipe_file

    def as_adlfs(self: object, path: str, value: bytes, overwrite: bool = True, **kwargs: str) -> None:
        put(self, path, value, **kwargs)

    monkeypatch.setattr(kind, as_adlfs)
    save_state(build(1.0), f"memory://{tmp_path.name}/run")
    assert stored(f"memory://{tmp_path.name}/run") == {1.0}


def test_a_clock_that_is_off_is_named(s3: FaultyProxy, bucket: str) -> None:
    """What a store says of a wrong clock comes with what to do."""
    s3.begin("skewed", 0, lasting=True)
    with pytest.raises(ConfigurationError, match="this machine's clock is off"):
        save_state(build(1.0), f"{bucket}/run")


def test_a_store_without_conditional_puts_is_refused(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that lets a second put replace the first is refused: two writers could mix a checkpoint there."""
    overwrite = lambda self, name, content: self._fs.pipe_file(self._path(name), content)  # noqa: E731
    monkeypatch.setattr(store.Store, "_create", overwrite)
    with pytest.raises(ConfigurationError, match="conditional put"):
        save_state(build(1.0), f"{bucket}/run")
    assert objects(bucket) == []


def test_a_number_that_is_taken_is_refused(address: str) -> None:
    """A run that begins anew in the address of another one's series says so and replaces nothing."""
    project = {"project_dir": address, "automatic_checkpoint_naming": True}
    save_state(build(1.0, **project))
    with pytest.raises(ConfigurationError, match="exists already, and automatic naming would overwrite it"):
        save_state(build(2.0, **project))
    assert stored(None, **project) == {1.0}


def test_half_a_checkpoint_is_no_checkpoint(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files without a commit are not loaded, the error counts them, and the next save deletes them."""

    def stop(self: RemoteStorage, *given: object) -> None:
        self.asked = True  # so that what is there stays, as after a kill
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RemoteStorage, "commit", stop)
        with pytest.raises(KeyboardInterrupt):
            save_state(build(1.0), address)
    half = objects(address)
    with pytest.raises(CheckpointNotFoundError, match=r"There is no complete checkpoint at .*; got \['0"):
        load_state(build(2.0), address)
    save_state(build(3.0), address)
    assert len(objects(address)) == len(half) + 2  # the manifest and the commit
    assert stored(address) == {3.0}


def test_what_lost_a_file_is_left_out_of_a_series(address: str) -> None:
    """The newest checkpoint of which somebody deleted a file is not loaded, and the one before is."""
    project = {"project_dir": address, "automatic_checkpoint_naming": True}
    run = build(1.0, **project)
    save_state(run)
    set_to(run, 2.0)
    damaged = place(str(save_state(run)))
    damaged.delete([f"{newest(damaged).folder}/model.safetensors"])
    assert stored(None, **project) == {1.0}
    with pytest.raises(CheckpointDamagedError, match=r"model\.safetensors"):
        load_state(build(5.0), damaged.address)


@world(2, quiet=15)
def save_series_of_many(variables: dict[str, str], address: str) -> None:
    """Save twice on two ranks and load the newest."""
    os.environ.update(variables)
    project = {"project_dir": address, "automatic_checkpoint_naming": True}
    run = build(1.0, **project)
    save_state(run)
    set_to(run, 2.0)
    save_state(run)
    assert stored(None, **project) == {2.0}


@pytest.mark.parametrize("name", ["accel_manifest/1.json", "random_states_1.pkl"])
def test_what_lost_a_file_of_many_ranks_is_left_out(s3: FaultyProxy, bucket: str, name: str) -> None:
    """A list of a rank, or a file in one, that somebody deleted: the checkpoint before is loaded."""
    save_series_of_many(settings(s3), bucket)
    project = {"project_dir": bucket, "automatic_checkpoint_naming": True}
    assert stored(None, **project) == {2.0}
    latest = place(f"{bucket}/checkpoints/checkpoint_1")
    latest.delete([f"{newest(latest).folder}/{name}"])
    assert stored(None, **project) == {1.0}
    if name.startswith("random"):
        return  # one rank alone does not read it
    with pytest.raises(CheckpointDamagedError, match=re.escape(name)):
        load_state(build(5.0), latest.address)


@pytest.mark.parametrize("name", ["model.safetensors", "accel_manifest.json"])
def test_bytes_that_changed_in_the_store_are_found(address: str, name: str) -> None:
    """A file with a changed byte, or a manifest of another save, is an error by name and changes nothing."""
    save_state(build(1.0), address)
    at = place(address)
    commit = newest(at)
    path = f"{commit.folder}/{name}"
    content = bytearray(at.read(path))
    content[-3] ^= 1
    at.delete([path])
    assert at.create(path, bytes(content))
    run = build(2.0)
    with pytest.raises(CheckpointDamagedError, match=name):
        load_state(run, address)
    assert values(run) == {2.0}


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # by gcsfs
def test_a_large_file_arrives_whole(bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file of several parts, the last of which is shorter, is read as it was written."""
    path, at = tmp_path / "large", place(f"{bucket}/run")
    path.write_bytes(os.urandom(17 << 20))
    at.put(path, "large")
    assert at.read("large") == path.read_bytes()


def test_a_full_disk_is_named(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where staging fills the disk, the error says so; nothing is committed."""

    def write(self: HashingFile, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(HashingFile, "write", write)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_state(build(1.0), address)
    assert objects(address) == []


def test_a_folder_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    """Only folders whose process has ended are deleted."""
    first, second, third = (Scratch.of(name, str(tmp_path)) for name in ("first", "second", "third"))
    first.make()
    (first.folder / "kept").write_text("")
    second.make()
    assert (first.folder / "kept").exists()
    assert first.lock is not None
    os.close(first.lock)  # as when the process ends
    third.make()
    assert not first.folder.exists()
    assert second.folder.is_dir()
    for each in (second, third):
        each.leave()
        assert not each.folder.exists()


def test_every_changed_byte_of_a_commit_is_found(tmp_path: Path) -> None:
    """A commit has no digest of its own: what it names is not there then, or not what it says."""
    address = f"memory://{tmp_path.name}/run"
    save_state(build(1.0), address)
    at = place(address)
    commit = newest(at)
    whole = at.read(commit.name)
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1
        at.delete([commit.name])
        assert at.create(commit.name, bytes(changed))
        with pytest.raises(CheckpointDamagedError, match=tmp_path.name):
            load_state(build(2.0), address)
