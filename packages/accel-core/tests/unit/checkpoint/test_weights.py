"""Weights of one model: shards, index, ties, stale files, damage."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from accel_core.checkpoint import manifest, names, plain, shards, tensor_file, weights
from accel_core.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnsafeCheckpointError,
)
from accel_core.modules.unwrap import canonical_state_dict

pytestmark = pytest.mark.usefixtures("fresh_state")


class Tied(nn.Module):
    """A model with a tied weight and a buffer that is a view of another weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("view", self.body.weight.data[:3])


def save(model: nn.Module, folder: Path, **kwargs: Any) -> None:
    """Save the canonical state of a model."""
    weights.save_model(model, canonical_state_dict(model).items(), folder, **kwargs)


def same(model: nn.Module, other: nn.Module) -> bool:
    """Compare the states of two models bit for bit."""
    one, two = model.state_dict(), other.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("limit", ["10GB", "600B", 300, 1])
def test_weights_come_back_from_any_number_of_shards(safe: bool, limit: int | str, tmp_path: Path) -> None:
    """Ties and views come back; no file holds more than the limit, but for a tensor that is larger."""
    limit = 600 if limit == "600B" else limit
    model, other = Tied(), Tied()
    save(model, tmp_path, max_shard_size=limit, safe_serialization=safe)
    report = weights.load_model(other, tmp_path)
    assert report.restored == ["model"]
    assert same(model, other)
    assert other.head.weight is other.embed.weight
    files = [name for name in os.listdir(tmp_path) if "json" not in name]
    assert (len(files) == 1) == (limit == "10GB")


@pytest.mark.parametrize("limit", ["10GB", 300])
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("wrapped", ["saved", "loaded", "both"])
def test_names_of_compiled_models_are_understood(wrapped: str, safe: bool, limit: int | str, tmp_path: Path) -> None:
    """Weights stored with the prefix of a compiled model or without it fill a compiled model and a bare one."""
    model, other = Tied(), Tied()
    state: dict[str, Any] = canonical_state_dict(model)
    if wrapped != "loaded":
        state = dict(torch.compile(model, backend="eager").state_dict())
        assert all(name.startswith("_orig_mod.") for name in state)
    weights.save_model(model, state.items(), tmp_path, max_shard_size=limit, safe_serialization=safe)
    target: nn.Module = other if wrapped == "saved" else torch.compile(other, backend="eager")  # type: ignore[assignment]
    assert weights.load_model(target, tmp_path).restored == ["model"]
    assert same(model, other)


def test_index_describes_the_shards(tmp_path: Path) -> None:
    """The index names each stored tensor once, with the bytes of all."""
    model = Tied()
    save(model, tmp_path, max_shard_size=600)
    index = json.loads((tmp_path / names.SAFE_WEIGHTS_INDEX_NAME).read_text())
    stored: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        stored |= safetensors.torch.load_file(tmp_path / file)
    assert index["weight_map"].keys() == stored.keys() == {"embed.weight", "body.weight", "body.bias", "view"}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())


def test_no_stale_file_is_left(tmp_path: Path) -> None:
    """Files of earlier saves in the same format go; weights in the other format and everything else stay."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model_1.safetensors").write_text("of a save_state")
    save(Tied(), tmp_path, max_shard_size=300)
    save(Tied(), tmp_path, max_shard_size=600, safe_serialization=False)
    save(Tied(), tmp_path)
    kept = [name for name in os.listdir(tmp_path) if name.startswith("pytorch_model-") and name.endswith(".bin")]
    assert len(kept) > 1
    rest = ["config.json", "model.safetensors", "model_1.safetensors", "pytorch_model.bin.index.json"]
    assert sorted(os.listdir(tmp_path)) == sorted([*rest, *kept])


@pytest.mark.slow
def test_a_save_of_shards_is_whole_or_not_there(tmp_path: Path) -> None:
    """Killed after each step: load_model gives the old or the new weights; whoever reads public names, or nothing."""
    old, new = Tied(), Tied()
    steps = ("rename", "link", "unlink", "fsync", "mkdir", "write", "rmdir")
    outcomes = set()
    for failing in range(1, 200):
        place = tmp_path / str(failing)
        save(old, place, max_shard_size=600)
        child = os.fork()
        if child == 0:
            left = [failing]
            for name in steps:
                original = getattr(os, name)

                def counted(*args: Any, original: Any = original, left: list[int] = left, **kwargs: Any) -> Any:
                    result = original(*args, **kwargs)
                    left[0] -= 1
                    if left[0] == 0:
                        os._exit(9)
                    return result

                setattr(os, name, counted)
            save(new, place, max_shard_size=600)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        loaded = Tied()
        weights.load_model(loaded, place)
        found = "old" if same(loaded, old) else "new" if same(loaded, new) else "a mixture"
        index = place / names.SAFE_WEIGHTS_INDEX_NAME
        public = "nothing"
        if index.exists():
            table = json.loads(index.read_text())["weight_map"]
            read = {file: safetensors.torch.load_file(place / file) for file in set(table.values())}
            shown = [name for name in table if torch.equal(read[table[name]][name], new.state_dict()[name])]
            public = "new" if len(shown) == len(table) else "old" if not shown else "a mixture"
        outcomes.add((found, public))
        save(new, place, max_shard_size=600)
        assert not [name for name in os.listdir(place) if name.startswith(".")]
        if code == 0:
            break
    assert outcomes == {("old", "old"), ("new", "old"), ("new", "nothing"), ("new", "new")}


def test_wrappers_do_not_show_in_names(tmp_path: Path) -> None:
    """A compiled model and one with activation checkpointing are saved under the bare model's names."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    bare, wrapped = Tied(), Tied()
    wrapped.body = checkpoint_wrapper(wrapped.body)
    compiled = torch.compile(wrapped, backend="eager")
    save(compiled, tmp_path)
    assert tensor_file.TensorFile(tmp_path, "model.safetensors").tensors.keys() == {
        "embed.weight",
        "body.weight",
        "body.bias",
        "view",
    }
    weights.load_model(bare, tmp_path)
    assert torch.equal(bare.body.weight, compiled.body.weight)


def test_a_failed_save_leaves_the_earlier_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is replaced before everything is written."""
    model = Tied()
    save(model, tmp_path)
    before = sorted(os.listdir(tmp_path))

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write_json", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(Tied(), tmp_path, max_shard_size=300)
    assert sorted(os.listdir(tmp_path)) == before
    other = Tied()
    weights.load_model(other, tmp_path)
    assert same(model, other)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("harm", ["truncated", "foreign", "empty"])
def test_damaged_weights_are_named_and_change_nothing(safe: bool, harm: str, tmp_path: Path) -> None:
    """A truncated file or one of another kind: our error with its name, and the model as it was."""
    save(Tied(), tmp_path, max_shard_size=600, safe_serialization=safe)
    victim = sorted(tmp_path.glob("*-of-*"))[-1]
    raw = victim.read_bytes()
    victim.write_bytes({"truncated": raw[: len(raw) - 10], "foreign": b"GIF89a" * 100, "empty": b""}[harm])
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointDamagedError, match=victim.name):
        weights.load_model(model, tmp_path)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_weights_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    """Missing, unexpected and mismatching names come in one error; strict=False loads the rest."""
    save(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)), tmp_path)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    before = model[0].weight.clone()
    with pytest.raises(CheckpointMismatchError, match=r"model: missing: 2\.weight") as caught:
        weights.load_model(model, tmp_path)
    assert "1.weight has shape (3, 2) instead of (2, 2)" in str(caught.value)
    assert torch.equal(model[0].weight, before)
    report = weights.load_model(model, tmp_path, strict=False)
    assert report.partial == ["model"]
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("target", ["../x.safetensors", "/etc/passwd", "a/../../x"])
def test_an_index_that_leads_outside_is_refused(target: str, tmp_path: Path) -> None:
    """File names in an index stay below its folder."""
    (tmp_path / names.SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps({"weight_map": {"a": target}}))
    with pytest.raises(UnsafeCheckpointError, match="leads outside"):
        shards.open_weights(tmp_path)


def test_a_fifo_is_refused_and_links_of_a_cache_are_followed(tmp_path: Path) -> None:
    """Hub caches are made of links; a FIFO does not hang."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save(Tied(), tmp_path / "blobs", max_shard_size=600)
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(f"../blobs/{file.name}")
    weights.load_model(Tied(), tmp_path / "snapshot")
    victim = next((tmp_path / "snapshot").glob("*-00001-*"))
    victim.unlink()
    os.mkfifo(victim)
    with pytest.raises(UnsafeCheckpointError, match="is a FIFO"):
        weights.load_model(Tied(), tmp_path / "snapshot")


def test_where_there_are_no_weights(tmp_path: Path) -> None:
    """A folder without weights, a file that is not there, and a folder that is a file are told apart."""
    (tmp_path / "notes").write_text("x")
    with pytest.raises(CheckpointNotFoundError, match="got none"):
        shards.open_weights(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="holds notes"):
        shards.open_weights(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is not one"):
        save(Tied(), tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "x"


def test_an_index_that_lies_about_its_shards_is_damage(tmp_path: Path) -> None:
    """A tensor that its shard does not hold is found before anything is loaded."""
    save(Tied(), tmp_path, max_shard_size=600)
    path = tmp_path / names.SAFE_WEIGHTS_INDEX_NAME
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = index["weight_map"]["view"]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointDamagedError, match="'ghost' is not in it"):
        shards.open_weights(tmp_path)


@pytest.mark.parametrize("safe", [True, False])
def test_names_that_share_memory_are_warned_of(safe: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A safetensors file stores what is tied under one name; `save` and `save_model` name the other one."""
    model = Tied()
    tied = "'head.weight' (as 'embed.weight')"
    for write in (
        lambda: plain.save(model.state_dict(), tmp_path / "file", safe_serialization=safe),
        lambda: plain.save(model.state_dict(), io.BytesIO(), safe_serialization=safe),
        lambda: save(model, tmp_path / "folder", safe_serialization=safe),
        lambda: save(model, tmp_path / "shards", max_shard_size=300, safe_serialization=safe),
    ):
        caplog.clear()
        write()
        assert (tied in caplog.text) is safe
    caplog.clear()
    plain.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "file", safe_serialization=safe)
    assert not caplog.text


def test_an_empty_model_is_not_saved(tmp_path: Path) -> None:
    """Of a model on the meta device nothing is written in either format, and what was there stays."""
    weights.save_model(model := nn.Linear(2, 2), None, tmp_path, safe_serialization=False)
    for safe in (True, False):
        with pytest.raises(CheckpointError, match="with data only"):
            weights.save_model(nn.Linear(2, 2, device="meta"), None, tmp_path, safe_serialization=safe)
    assert torch.equal(torch.load(tmp_path / names.WEIGHTS_NAME)["weight"], model.weight)


def test_the_index_says_where_a_tensor_is(tmp_path: Path) -> None:
    """A note in one shard that the name is another one's does not count."""
    pytest.importorskip("numpy", reason="safetensors' own writer needs numpy, which accel-core does not")
    safetensors.torch.save_file({"y": torch.ones(2)}, tmp_path / "a.safetensors", {"x": "y"})
    safetensors.torch.save_file({"x": torch.zeros(2)}, tmp_path / "b.safetensors")
    index = {"weight_map": {"y": "a.safetensors", "x": "b.safetensors"}}
    (tmp_path / names.SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index))
    model = nn.Module()
    model.x, model.y = nn.Parameter(torch.full((2,), 5.0)), nn.Parameter(torch.full((2,), 5.0))
    weights.load_model(model, tmp_path)
    assert [model.x.tolist(), model.y.tolist()] == [[0.0, 0.0], [1.0, 1.0]]
