"""Folders of shards are read without running anything from them, and nothing of a damaged one is taken for data."""

from __future__ import annotations

import os
import pickle
import random
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as torchs

from accel_core.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnsafeCheckpointError,
)
from accel_parallel.checkpoint import optimizers
from accel_parallel.checkpoint.closed_pickle import load_closed
from accel_parallel.checkpoint.metadata import covers, decode, places_of
from accel_parallel.checkpoint.reader import ShardFolder

CONTENT = {
    "model": {"weight": torch.arange(6.0).reshape(3, 2), "scale": torch.tensor(2.0, dtype=torch.bfloat16)},
    "groups": [{"lr": 0.5, "params": ["weight"]}],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that torch wrote."""
    folder = tmp_path_factory.mktemp("shards")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(CONTENT, checkpoint_id=folder)
    return folder


def test_what_torch_wrote_is_read(saved: Path) -> None:
    """Tensors whole and into memory; objects; where each belongs; and which file holds what."""
    shards = ShardFolder(saved)
    assert torch.equal(shards.read("model.weight"), CONTENT["model"]["weight"])  # type: ignore[call-overload]
    into = torch.zeros(3, 2)
    shards.read_into("model.weight", into)
    assert torch.equal(into, CONTENT["model"]["weight"])  # type: ignore[call-overload]
    assert shards.tensors["model.scale"].dtype == torch.bfloat16
    assert shards.read("groups.0.params") == ["weight"]
    assert shards.paths()["groups.0.lr"] == ("groups", 0, "lr")
    assert shards.check() == {}
    assert sorted(shards.contents()["__0_0.distcp"]) == sorted(["model.weight", "model.scale", *shards.objects])


def test_lazy_neg_gets_the_values_of_the_folder(saved: Path) -> None:
    """Its memory holds other values than it shows, so bytes of a file have no place there."""
    into = torch._neg_view(torch.zeros(3, 2))
    ShardFolder(saved).read_into("model.weight", into)
    assert torch.equal(into, CONTENT["model"]["weight"])  # type: ignore[call-overload]


def test_tensors_are_read_on_the_cpu_under_any_default_device(saved: Path) -> None:
    """Bytes of a file reach memory of the CPU, whether a tensor is read at once or piece by piece."""
    weight = torch.arange(6.0).reshape(3, 2)
    with torch.device("meta"):
        shards = ShardFolder(saved)
        found = shards.read("model.weight")
        streamed = torch.cat([part.clone() for part in shards.pieces("model.weight")])
    assert torch.equal(found, weight)
    assert torch.equal(streamed.view(torch.float32), weight.flatten())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_pickle_is_read(saved: Path, protocol: int) -> None:
    """A list of shards that a newer or older Python wrote says the same."""
    raw = (saved / ".metadata").read_bytes()
    other = pickle.dumps(pickle.loads(raw), protocol=protocol)
    ours, theirs = decode(raw, saved), decode(other, saved)
    assert repr(places_of(ours)) == repr(places_of(theirs))
    assert places_of(ours).keys() == pickle.loads(raw).storage_data.keys()
    assert ours.planner_data == theirs.planner_data == pickle.loads(raw).planner_data


class Evil:
    """An object whose pickle runs code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/never",)


def test_nothing_is_run_from_a_list_of_shards(saved: Path, tmp_path: Path) -> None:
    """A function is refused by name, also one that hides where a record would hold it."""
    with pytest.raises(UnsafeCheckpointError, match=r"got posix\.system"):
        decode(pickle.dumps(Evil()), tmp_path)
    listed = pickle.loads((saved / ".metadata").read_bytes())
    listed.state_dict_metadata["model.weight"] = Evil()
    with pytest.raises(UnsafeCheckpointError, match=r"posix\.system"):
        decode(pickle.dumps(listed), tmp_path)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd"])
def test_a_shard_outside_the_folder_is_refused(saved: Path, name: str) -> None:
    """A list that names a file elsewhere is unsafe."""
    listed = pickle.loads((saved / ".metadata").read_bytes())
    for place in listed.storage_data.values():
        place.relative_path = name
    with pytest.raises(UnsafeCheckpointError, match=r"outside"):
        decode(pickle.dumps(listed), saved)


def test_pieces_that_make_no_tensor_are_refused(saved: Path) -> None:
    """Memory that no piece fills, and sizes beyond what the file has, are found before anything is read."""
    for change, words in (
        (lambda stored: setattr(stored, "size", torch.Size([4, 2])), "do not make a tensor of shape"),
        (lambda stored: stored.chunks.clear(), "do not make a tensor of shape"),
        (lambda stored: stored.chunks.append(stored.chunks[0]), "do not make a tensor of shape"),
        (lambda stored: setattr(stored.chunks[0], "sizes", torch.Size([1 << 40, 2])), "larger than its place"),
        (lambda stored: setattr(stored.chunks[0], "offsets", torch.Size([1, 0])), "offset=torch.Size"),
    ):
        listed = pickle.loads((saved / ".metadata").read_bytes())
        change(listed.state_dict_metadata["model.weight"])  # type: ignore[no-untyped-call]
        with pytest.raises(CheckpointDamagedError, match=words):
            decode(pickle.dumps(listed), saved)
    assert isinstance(listed, torchs.Metadata)


def test_a_missing_or_foreign_shard_is_named_with_its_tensors(saved: Path, tmp_path: Path) -> None:
    """A shard that is gone, cut off, or of another save: what it held, and nothing is read from it."""
    (tmp_path / ".metadata").write_bytes((saved / ".metadata").read_bytes())
    shards, place = ShardFolder(tmp_path), tmp_path / "__0_0.distcp"
    assert "is not there; it holds groups.0" in shards.check()[place.name]
    with pytest.raises(CheckpointDamagedError, match=r"is not there; got nothing to read model.weight from"):
        shards.read("model.weight")
    raw = (saved / place.name).read_bytes()
    place.write_bytes(raw[:-1])
    assert f"has {len(raw) - 1} bytes instead of {len(raw)}; it holds" in shards.check()[place.name]
    last = max(places_of(shards.metadata).items(), key=lambda item: item[1].offset)[0].fqn
    with pytest.raises(CheckpointDamagedError, match=rf"{place.name}' is damaged"):
        shards.read(last)
    other = tmp_path / "other"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        changed = {**CONTENT, "model": {"weight": torch.zeros(2, 3), "scale": torch.tensor(1.0, dtype=torch.bfloat16)}}
        dcp.save(changed, checkpoint_id=other)
    place.write_bytes((other / place.name).read_bytes())
    with pytest.raises(CheckpointDamagedError, match=r"is not the one that its list describes|damaged"):
        shards.read("model.weight")
    with pytest.raises(CheckpointNotFoundError, match=r"list of shards .* does not exist"):
        ShardFolder(tmp_path / "nowhere")


def test_a_damaged_list_is_an_error_of_ours(saved: Path) -> None:
    """Whatever byte of the list is changed or cut off, it is read as a list that holds together, or refused."""
    raw, choose = (saved / ".metadata").read_bytes(), random.Random(1)
    for turn in range(600):
        harmed = bytearray(raw)
        if turn % 3 == 0:
            del harmed[choose.randrange(len(raw)) :]
        for _ in range(turn % 3):
            harmed[choose.randrange(len(harmed))] = choose.randrange(256)
        try:
            found = decode(bytes(harmed), saved)
        except CheckpointError:
            continue
        tensors = [
            each for each in found.state_dict_metadata.values() if isinstance(each, torchs.TensorStorageMetadata)
        ]
        assert all(map(covers, tensors))


def test_a_large_number_of_a_memo_takes_no_memory() -> None:
    """An instruction that would make Python's own reader reserve gigabytes is only a key here."""
    assert load_closed(b"\x80\x02Nr\xff\xff\xff\xff.", {}, ()) is None
    with pytest.raises((pickle.UnpicklingError, MemoryError)):
        load_closed(b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x00.", {}, ())


def test_flattened_transformers_optimizers_are_refused(tmp_path: Path) -> None:
    """What its `save_optimizer_distributed` writes has other names; the error says who reads it."""
    state = {"state.head.weight.exp_avg": torch.zeros(2), "param_groups.head.weight.lr": 0.1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is one process
        dcp.save({"optimizer": state}, checkpoint_id=tmp_path)
    with pytest.raises(
        CheckpointMismatchError, match=r"is flattened, .*got optimizer\.\w+\.head.*load_optimizer_distrib"
    ):
        optimizers._Stored.of(ShardFolder(tmp_path))
