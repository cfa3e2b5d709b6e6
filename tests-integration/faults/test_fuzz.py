"""Altered indexes, manifests and shards by the hundred: refused by name, or read; never anything else."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from accel_core.accelerator import Accelerator
from accel_core.checkpoint import names, weights
from accel_core.checkpoint.digest import digest_of_bytes
from accel_core.checkpoint.load import load_state
from accel_core.checkpoint.run import BareRun
from accel_core.checkpoint.save import save_state
from accel_core.comm.objects import gather_object
from accel_core.errors import CheckpointError
from accel_core.mesh.tensor import local_part
from accel_core.modules.unwrap import canonical_state_dict
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_testing import world

pytestmark = pytest.mark.usefixtures("fresh_state")

CASES = settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MORE = pytest.mark.full("fuzz by the hundred")
FILES = st.sampled_from(
    [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "../model.safetensors",
        "/etc/passwd",
        "/dev/zero",
        ".",
        "..",
        "",
        "a\0b",
        "nowhere.safetensors",
        "model.safetensors.index.json",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["0.weight", "0.bias", "1.weight", "1.bias", "ghost", ""])
INDEXES = (
    st.binary(max_size=40)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.fixed_dictionaries(
        {"weight_map": st.dictionaries(NAMES, FILES | JSON, max_size=5) | JSON}, optional={"metadata": JSON}
    ).map(lambda value: json.dumps(value).encode())
)


def build() -> nn.Module:
    """Return a model of four tensors."""
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a model's tensors."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(before: dict[str, torch.Tensor], model: nn.Module) -> bool:
    """Tell whether a model is as it was."""
    return all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Give a folder with a model in two shards."""
    model = build()
    weights.save_model(model, canonical_state_dict(model), tmp_path, max_shard_size=60)
    assert (tmp_path / names.SAFE_WEIGHTS_INDEX_NAME).exists()
    return tmp_path


@CASES
@given(index=INDEXES)
def test_fuzzed_index(sharded: Path, index: bytes) -> None:
    """Whatever the index says, the error is ours and the model as it was."""
    (sharded / names.SAFE_WEIGHTS_INDEX_NAME).write_bytes(index)
    model = build()
    before = copied(model)
    try:
        weights.load_model(model, sharded / names.SAFE_WEIGHTS_INDEX_NAME)
    except CheckpointError as error:
        refusal = str(error)
    else:
        refusal = ""
    assert not refusal or same(before, model)
    assert not refusal or str(sharded) in refusal


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Give a checkpoint."""
    save_state(BareRun([build()]), tmp_path / "ckpt")
    return tmp_path / "ckpt"


def change(draw: Any, data: dict[str, Any]) -> None:
    """Alter one thing in a manifest."""
    what = draw(st.sampled_from(["field", "entry", "drop", "twice", "add"]))
    if what == "field":
        data[draw(st.sampled_from(sorted(data)))] = draw(JSON)
    elif what == "entry":
        entry = draw(st.sampled_from(data["entries"]))
        entry[draw(st.sampled_from(sorted(entry)))] = draw(JSON | FILES)
    elif what == "drop":
        data["entries"].remove(draw(st.sampled_from(data["entries"])))
    elif what == "twice":
        data["entries"].append(draw(st.sampled_from(data["entries"])))
    else:
        data["entries"].append({"name": draw(FILES), "size": draw(st.integers(0, 9)), "digest": "0", "rank": 0})


@CASES
@given(data=st.data(), raw=st.none() | st.binary(max_size=60), signed=st.booleans())
def test_fuzzed_manifest(saved: Path, data: st.DataObject, raw: bytes | None, signed: bool) -> None:
    """Altered anywhere: refused, and the model as it was. Only a forger who signs can drop a file from the list."""
    path = saved / names.MANIFEST_NAME
    whole = path.read_bytes()
    if raw is None:
        content = json.loads(whole)
        content.pop("digest")
        change(data.draw, content)
        digest = digest_of_bytes(json.dumps(content, sort_keys=True).encode()) if signed else "0" * 32
        raw = json.dumps(content | {"digest": digest}, indent=1, sort_keys=True).encode() + b"\n"
    run = BareRun([build()])
    before = copied(run.models[0])
    refused = False
    try:
        path.write_bytes(raw)
        load_state(run, saved)
    except CheckpointError:
        refused = True
    finally:
        path.write_bytes(whole)
    assert refused == same(before, run.models[0])
    assert refused or signed


def sharded_run() -> Any:
    """Return a run after a step, its model and optimizer in shards."""
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    )
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    return accelerator._runtime


def tensors_of(run: Any) -> list[torch.Tensor]:
    """Return what this rank holds of weights and moments."""
    parameters = list(run.models[0].parameters())
    moments = [value for parameter in parameters for _, value in sorted(run.optimizers[0].state[parameter].items())]
    return [local_part(value.detach()) for value in [*parameters, *moments]]


def harm(place: Path, other: Path, choose: random.Random) -> str:
    """Do one thing to a file of a checkpoint, mostly to a shard, and return what."""
    files = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    files = [name for name in files if name != names.MANIFEST_NAME]
    shards = [name for name in files if name.endswith(".distcp")]
    name = choose.choice(shards if choose.random() < 0.7 else files)
    what = choose.choice(["bytes", "cut", "longer", "gone", "a folder", "of another save", "another shard"])
    content = before = (place / name).read_bytes()
    if what == "bytes":
        at = choose.randrange(len(before))
        content = before[:at] + bytes([before[at] ^ choose.randrange(1, 256)]) + before[at + 1 :]
    elif what == "cut":
        content = before[: choose.randrange(len(before))]
    elif what == "longer":
        content = before + bytes(choose.randrange(1, 100))
    elif what == "of another save":
        content = (other / name).read_bytes()
    elif what == "another shard":
        content = (place / choose.choice(shards)).read_bytes()
    (place / name).unlink()
    if what == "a folder":
        (place / name).mkdir()
    elif what != "gone":
        (place / name).write_bytes(content)
    return f"{name}: {what}" if content != before or what in ("gone", "a folder") else "nothing"


@pytest.mark.parametrize("cases", [30, pytest.param(120, marks=MORE)])
@world(2)
def test_fuzzed_shards(cases: int, tmp_path: Path) -> None:
    """With a manifest every harm is refused, without one it is refused or read: by both ranks alike, never in part."""
    run, choose = sharded_run(), random.Random(1)
    for name in ("whole", "other"):
        save_state(run, tmp_path / name)
        tensors_of(run)[0].add_(1)
    before = [tensor.clone() for tensor in tensors_of(run)]
    outcomes = set()
    for number in range(cases):
        place, listed, what = tmp_path / f"harmed {number}", number % 2 == 0, ""
        if run.world.is_main:
            shutil.copytree(tmp_path / "whole", place)
            if not listed:
                for name in (names.MANIFEST_NAME, "accel_progress.json"):
                    os.unlink(place / name)
            what = harm(place, tmp_path / "other", choose)
        (what, _), text = gather_object([what]), ""
        try:
            load_state(run, place)
        except CheckpointError as error:
            text = f"{type(error).__name__}: {error}"
        said = gather_object([text])
        assert len(set(said)) == 1, f"{what}: {said}"
        untouched = all(torch.equal(*pair) for pair in zip(before, tensors_of(run), strict=True))
        assert untouched if text else not untouched, what
        assert text or not listed or what == "nothing", what
        outcomes.add((listed, bool(text)))
        if not untouched:
            for tensor, value in zip(tensors_of(run), before, strict=True):
                tensor.copy_(value)
    assert {(True, True), (False, True), (False, False)} <= outcomes
