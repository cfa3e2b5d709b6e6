"""Checkpoints of more ranks than tell one another every file: each rank lists its own."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_core.checkpoint import commit, names
from accel_core.checkpoint.digest import digest_of_bytes
from accel_core.checkpoint.load import load_state
from accel_core.checkpoint.manifest import Entry, Manifest, found_save
from accel_core.checkpoint.ranks import Ranks
from accel_core.checkpoint.run import BareRun
from accel_core.checkpoint.save import save_state
from accel_core.comm import transport
from accel_core.errors import CheckpointDamagedError, CheckpointError
from accel_core.process.world import ensure
from accel_core.testing import world
from accel_core.testing.world import run


def build(seed: int, **project: Any) -> BareRun:
    """Return a small run of what agrees as more than 64 ranks do, whose random states are of the rank."""
    transport._FRAMES_UPTO = 1  # the process ends with the test
    torch.manual_seed(seed)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    made = BareRun([model], [optimizer], step=seed)
    for name, value in project.items():
        setattr(made.project, name, value)
    torch.manual_seed(seed * 100 + made.world.rank)
    return made


def drawn(seed: int, rank: int) -> float:
    """Return the number that a rank draws next after `build`."""
    return torch.rand(1, generator=torch.Generator().manual_seed(seed * 100 + rank)).item()


def harm(folder: Path, rank: int, how: str) -> None:
    """Harm the list of a rank."""
    path = folder / names.list_name(rank)
    if how == "lost":
        path.unlink()
    elif how == "torn":
        path.write_bytes(path.read_bytes()[:-20])
    elif how == "flipped":
        path.write_bytes(path.read_bytes().replace(b'"size": 1', b'"size": 2'))
    elif how == "file":
        (folder / names.random_states_name(rank)).unlink()
    else:
        shutil.copy(folder.with_name("earlier") / names.list_name(rank), path)


@world(4)
def test_each_rank_lists_its_own_files(tmp_path: Path) -> None:
    """The head lists what one rank wrote and names the others; all lists together list all files, and all come back."""
    own = build(1)
    save_state(own, tmp_path / "ckpt")
    head, everything = Manifest.read(tmp_path / "ckpt", ()), Manifest.read(tmp_path / "ckpt")
    assert head is not None
    assert everything is not None
    assert head.lists == ((1, 3),)
    assert {entry.rank for entry in head.entries} == {0}
    assert {entry.rank for entry in everything.entries} == set(range(4))
    there = set(commit.files_in(tmp_path / "ckpt")) - {names.MANIFEST_NAME}
    assert {entry.name for entry in everything.entries} == {name for name in there if "/" not in name}
    assert set(everything.files()) == there
    assert everything.damages(tmp_path / "ckpt") == {}
    report = load_state(build(2), tmp_path / "ckpt")
    assert report.findings == []
    assert torch.rand(1).item() == drawn(1, own.world.rank)


@world(2)
def test_nothing_of_a_save_is_gathered_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files differ from rank to rank, and still no rank receives what each of the others brings."""
    own, gathered, gather = build(1), [], transport.Transport.all_gather

    def noted(self: transport.Transport, data: torch.Tensor) -> torch.Tensor:
        gathered.append(data.nbytes)
        return gather(self, data)

    monkeypatch.setattr(transport.Transport, "all_gather", noted)
    save_state(own, tmp_path / "ckpt")
    assert gathered == []
    assert Ranks(own.world).exchange(own.world.rank) == [0, 1]
    assert gathered, "what differs is gathered"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("lost", r"accel_manifest/2\.json is missing"),
        ("torn", r"accel_manifest/2\.json is damaged"),
        ("flipped", r"accel_manifest/2\.json is damaged"),
        ("earlier", r"accel_manifest/2\.json is of another save"),
        ("file", r"random_states_2\.pkl is missing"),
    ],
)
@world(3)
def test_a_list_that_is_not_whole_is_named(tmp_path: Path, how: str, words: str) -> None:
    """A list that is lost, cut off, altered or of another save is found on every rank, and nothing changes."""
    own = build(1)
    save_state(own, tmp_path / "earlier")
    save_state(own, tmp_path / "ckpt")
    if own.world.is_main:
        harm(tmp_path / "ckpt", 2, how)
    other = build(2)
    kept = [weight.detach().clone() for weight in other.models[0].parameters()]
    with pytest.raises(CheckpointDamagedError, match=words):
        load_state(other, tmp_path / "ckpt")
    assert not found_save(tmp_path / "ckpt").whole
    assert all(map(torch.equal, kept, other.models[0].parameters()))
    assert load_state(other, tmp_path / "earlier").findings == []


@pytest.mark.parametrize("how", ["lost", "torn", "file"])
@world(3)
def test_the_newest_with_all_its_lists_is_found(tmp_path: Path, how: str) -> None:
    """A checkpoint whose list of one rank is not whole is left out of a series; the next save deletes and replaces."""
    settings = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True, "total_limit": 2}
    own = build(1, **settings)
    for _ in range(3):
        save_state(own)
    series = tmp_path / "checkpoints"
    assert sorted(path.name for path in series.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    if own.world.is_main:
        harm(series / "checkpoint_2", 2, how)
    other = build(2, **settings)
    assert load_state(other).folder == series / "checkpoint_1"
    assert other.project.iteration == 2
    other.project.iteration = 3
    save_state(other)
    assert load_state(build(3, **settings)).folder == series / "checkpoint_3"


@world(2)
def test_saving_again_into_the_folder(tmp_path: Path) -> None:
    """What others keep there stays, also among the lists; files and lists of the save before go or are replaced."""
    own = build(1)
    (tmp_path / "ckpt" / names.LISTS_NAME).mkdir(parents=True, exist_ok=True)
    (tmp_path / "ckpt" / names.LISTS_NAME / "notes.txt").write_text("mine")
    save_state(own, tmp_path / "ckpt")
    save_state(own, tmp_path / "ckpt", parts=("model",))
    there = set(commit.files_in(tmp_path / "ckpt"))
    assert there == {"model.safetensors", "accel_parts.json", "accel_manifest.json", "accel_manifest/notes.txt"}
    save_state(own, tmp_path / "ckpt", blocking=False).wait()  # type: ignore[union-attr]
    assert names.list_name(1) in commit.files_in(tmp_path / "ckpt")
    assert load_state(build(2), tmp_path / "ckpt").findings == []


class Careless:
    """A part that does not list what it writes, or lists what it does not write."""

    concurrent = False

    def __init__(self, adds: bool) -> None:
        self.adds = adds

    def write(self, folder: Path, rank: int) -> list[Entry]:
        """Write a file, or say so."""
        if self.adds:
            (folder / "secret.bin").write_bytes(b"1")
        return [] if self.adds else [Entry("promised.bin", 1, digest_of_bytes(b"1"), rank)]


@pytest.mark.parametrize(
    ("adds", "words"), [(True, r"\['secret.bin'\] that no part"), (False, r"and \['promised.bin'\]")]
)
@world(3)
def test_files_and_lists_that_differ_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adds: bool, words: str
) -> None:
    """A file that no rank lists, or that a list has and nobody wrote, ends the save on every rank, by name."""
    own, form = build(1), build(1).strategy.format
    found = type(form).parts
    monkeypatch.setattr(
        type(form), "parts", lambda self, request: found(self, request) + [Careless(adds)] * (own.world.rank == 2)
    )
    with pytest.raises(CheckpointError, match=words):
        save_state(own, tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()


def save_here(folder: Path) -> None:
    """Save on some ranks."""
    save_state(build(1), folder)


def load_here(folder: Path, size: int) -> None:
    """Load on others."""
    own = build(2)
    report = load_state(own, folder)
    assert report.world_size == size
    assert report.findings == []
    assert all(map(torch.equal, build(1).models[0].parameters(), own.models[0].parameters()))


@pytest.mark.parametrize(("saving", "loading"), [(4, 2), (2, 4), (3, 1)])
def test_other_numbers_of_ranks_load_it(tmp_path: Path, saving: int, loading: int) -> None:
    """All ranks that load look after all files between them: one that is lost is named by whoever has its list."""
    assert run(save_here, saving, (tmp_path / "ckpt",)) is None
    assert run(load_here, loading, (tmp_path / "ckpt", saving)) is None
    (tmp_path / "ckpt" / names.random_states_name(saving - 1)).unlink()
    failure = run(load_here, loading, (tmp_path / "ckpt", saving))
    assert failure is not None
    assert f"{names.random_states_name(saving - 1)} is missing" in failure


@pytest.mark.parametrize(
    "lists", [[[1, 0]], [[0, 2]], [[1, 1], [1, 2]], [[-1, 1]], [[True, 1]], [[1]], 5, [[0, 10**15]]]
)
def test_invented_lists_are_damage(lists: object, tmp_path: Path) -> None:
    """Ranks that no run of so many has, or that are named twice, are no ranks with lists."""
    written = Manifest((), 10**16 if lists == [[0, 10**15]] else 2, lists=())
    data = json.loads(written.encode()) | {"lists": lists}
    del data["digest"]
    digest = digest_of_bytes(json.dumps(data, sort_keys=True).encode())
    raw = json.dumps(data | {"digest": digest}, indent=1, sort_keys=True).encode() + b"\n"
    with pytest.raises(CheckpointDamagedError, match=r"The manifest .* is damaged"):
        Manifest.decode(raw, tmp_path / "accel_manifest.json")
    assert Manifest.decode(written.encode(), tmp_path).lists == ()


@world(2)
def test_a_lost_list_among_many_is_not_searched_for_ever(tmp_path: Path) -> None:
    """A head that names a million lists that are not there is damage, found after some of them."""
    if ensure().is_main:
        folder = tmp_path / "ckpt"
        folder.mkdir()
        Manifest((), 1 << 20, lists=((0, (1 << 20) - 1),)).write(folder)
        found = Manifest.read(folder)
        assert found is not None
        assert 0 < len(found.lost) < 1000
