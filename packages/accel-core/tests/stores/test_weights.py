"""Weights alone at an address: written in one step, read by whoever reads weights."""

import json
from pathlib import Path

import pytest
import torch
from small_run import build
from store_server import FaultyProxy
from torch import nn

from accel_core.checkpoint.address import Address, address_of
from accel_core.checkpoint.remote import store
from accel_core.checkpoint.remote.weights import local_weights
from accel_core.checkpoint.save import save_state
from accel_core.checkpoint.weights import load_model, save_model
from accel_core.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError

pytestmark = pytest.mark.usefixtures("fresh_state")


def net(value: float) -> nn.Module:
    """Return a model of two layers, all of whose weights have one value."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def read(address: str) -> set[float]:
    """Return the values of the weights at an address."""
    model = net(99.0)
    load_model(model, address)
    return {float(each) for parameter in model.parameters() for each in parameter.detach().flatten()}


def listed(address: str) -> list[str]:
    """Return the names of the objects at an address."""
    found = address_of(address)
    assert isinstance(found, Address)
    return sorted(store.Store(found).sizes(""))


@pytest.mark.parametrize("safe", [True, False])
def test_weights_come_back_in_each_form(bucket: str, safe: bool) -> None:
    """One file, shards, and one file again, each in place of the one before, of which nothing stays."""
    at = f"{bucket}/weights"
    single = "model.safetensors" if safe else "pytorch_model.bin"
    for value, limit in ((1.0, "10GB"), (2.0, "0.4KB"), (3.0, "0.4KB"), (4.0, "10GB")):
        save_model(net(value), None, at, max_shard_size=limit, safe_serialization=safe)
        assert read(at) == {value}
        names = listed(at)
        assert (names == [single]) == (limit == "10GB"), names
        assert len({name.partition("/")[0] for name in names if "/" in name}) == (limit == "0.4KB")


def test_shards_are_what_other_readers_expect(bucket: str) -> None:
    """The index names each shard by its path below the folder, which holds what the index says."""
    at = f"{bucket}/weights"
    save_model(net(2.0), None, at, max_shard_size="0.4KB")
    folder = local_weights(at)
    table = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(table) == set(net(0.0).state_dict())
    assert all((folder / file).is_file() for file in table.values())


@pytest.mark.parametrize("limits", [("10GB", "10GB"), ("10GB", "0.4KB"), ("0.4KB", "10GB"), ("0.4KB", "0.4KB")])
def test_a_save_that_stops_anywhere_leaves_the_old_or_the_new(
    s3: FaultyProxy, bucket: str, limits: tuple[str, str]
) -> None:
    """Where every request fails from one on, what is read afterwards are the old weights or the new ones."""
    at, outcomes = f"{bucket}/weights", set()
    for number in range(99):
        save_model(net(1.0), None, at, max_shard_size=limits[0])
        s3.begin("500", number, lasting=True)
        try:
            save_model(net(2.0), None, at, max_shard_size=limits[1])
            done = True
        except CheckpointError:
            done = False
        s3.begin()
        found = read(at)
        assert found == {2.0} if done else found in ({1.0}, {2.0}), number
        outcomes.add(float(*found))
        if done:
            break
    assert outcomes == {1.0, 2.0}


def test_weights_of_a_whole_run_are_found(s3: FaultyProxy, bucket: str) -> None:
    """The address of a checkpoint of `save_state` is one of weights too; its optimizer is not fetched."""
    save_state(build(3.0), f"{bucket}/run")
    s3.begin()
    folder = local_weights(f"{bucket}/run")
    assert (folder / "model.safetensors").is_file()
    assert not (folder / "optimizer.bin").exists()
    assert [path for _, path, _ in s3.seen if "optimizer" in path] == []


def test_one_file_of_many_is_fetched_alone(s3: FaultyProxy, bucket: str) -> None:
    """The address of one file fetches that one."""
    save_model(net(2.0), None, f"{bucket}/weights")
    save_model(net(3.0), None, f"{bucket}/weights", safe_serialization=False)
    assert read(f"{bucket}/weights/pytorch_model.bin") == {3.0}
    assert [name.name for name in local_weights(f"{bucket}/weights/pytorch_model.bin").parent.iterdir()] == [
        "pytorch_model.bin"
    ]


def test_weights_are_fetched_once(s3: FaultyProxy, bucket: str) -> None:
    """A second reader of the same weights fetches nothing, and after a save the new ones are read."""
    save_model(net(2.0), None, f"{bucket}/weights")
    first = local_weights(f"{bucket}/weights")
    s3.begin()
    assert local_weights(f"{bucket}/weights") == first
    assert [path for _, path, _ in s3.seen if path.endswith(".safetensors")] == []
    save_model(net(3.0), None, f"{bucket}/weights")
    assert read(f"{bucket}/weights") == {3.0}


def test_weights_that_are_not_there_or_damaged_are_named(bucket: str) -> None:
    """Nothing at an address, and a file of a checkpoint with other bytes than its digest says, are errors by name."""
    with pytest.raises(CheckpointNotFoundError, match="There are no weights at"):
        local_weights(f"{bucket}/nothing")
    save_state(build(3.0), f"{bucket}/run")
    name = next(name for name in listed(f"{bucket}/run") if name.endswith("model.safetensors"))
    found = address_of(f"{bucket}/run")
    assert isinstance(found, Address)
    at = store.Store(found)
    content = bytearray(at.read(name))
    content[-1] ^= 1
    at.delete([name])
    at.create(name, bytes(content))
    with pytest.raises(CheckpointDamagedError, match="another digest"):
        local_weights(f"{bucket}/run")


def test_weights_replaced_during_a_fetch_are_not_mixed(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a file of which some were read before it was replaced and some after it are an error."""
    at = f"{bucket}/weights"
    save_model(net(2.0), None, at)
    get, seen = store.Store.get, []

    def replaced(self: store.Store, name: str, path: Path) -> None:
        if name == "model.safetensors" and not seen:
            seen.append(name)
            save_model(net(3.0), None, at)
        get(self, name, path)

    monkeypatch.setattr(store.Store, "get", replaced)
    with pytest.raises(CheckpointError, match="were replaced while they were fetched"):
        local_weights(at)
    assert read(at) == {3.0}
