"""What big-model loading reads of damaged and hostile files: nothing, and it says which file."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel import load_checkpoint_and_dispatch, load_checkpoint_in_model
from accel_bigmodel.checkpoint.read import load_state_dict, open_checkpoint
from accel_bigmodel.checkpoint.skeleton import skeleton_of
from accel_core.checkpoint import commit
from accel_core.checkpoint.weights import save_model
from accel_core.errors import AccelError, CheckpointDamagedError, CheckpointMismatchError, CheckpointNotFoundError


def write(path: Path, header: Any, data: bytes) -> None:
    """Write a safetensors file with a header of one's own."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def entry(**changes: Any) -> dict[str, Any]:
    """Return the description of one float, changed."""
    return {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}


HEADERS: dict[str, Any] = {
    "infinite": b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,4]}}',
    "deep": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "negative": {"a": entry(shape=[-1, -1])},
    "empty and huge": {"a": entry(shape=[0, 2**63], data_offsets=[0, 0]), "b": entry()},
    "hole": {"a": entry(data_offsets=[4, 8])},
    "overlap": {"a": entry(), "b": entry()},
    "trailing": {"a": entry(dtype="U8", data_offsets=[0, 1])},
    "text": {"a": entry(shape=["1"])},
    "float": {"a": entry(shape=[1.0])},
    "bom": b"\xef\xbb\xbf" + json.dumps({"a": entry()}).encode(),
    "field twice": b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
}


@pytest.mark.parametrize("kind", HEADERS)
def test_headers_that_safetensors_refuses_are_refused(kind: str, tmp_path: Path) -> None:
    """Neither weights nor a skeleton are made of them, and the error names the file."""
    path = tmp_path / "x.safetensors"
    write(path, HEADERS[kind], bytes(8 if kind == "hole" else 4))
    for read in (load_state_dict, skeleton_of, open_checkpoint):
        with pytest.raises(CheckpointDamagedError, match=r"x\.safetensors"):
            read(path)


def test_booleans_that_are_none_are_refused(tmp_path: Path) -> None:
    """A byte of 2 in a boolean tensor is refused when the tensor is taken."""
    write(tmp_path / "x.safetensors", {"a": entry(dtype="BOOL", shape=[2], data_offsets=[0, 2])}, b"\1\2")
    with pytest.raises(CheckpointDamagedError, match="neither 0 nor 1"):
        load_state_dict(tmp_path / "x.safetensors")


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_weights_of_another_kind_are_not_cast_to_a_plain_model(dtype: torch.dtype, form: str, tmp_path: Path) -> None:
    """Integers and complex numbers where a floating point parameter is due are named; the model is as it was."""
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    state = {"weight": torch.ones(2, 2, dtype=dtype), "bias": torch.ones(2)}
    if form == "bin":
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        # By hand: older releases of safetensors write no complex numbers.
        raw = state["weight"].numpy().tobytes() + state["bias"].numpy().tobytes()
        kind = {torch.int32: "I32", torch.complex64: "C64"}[dtype]
        header = {"weight": entry(dtype=kind, shape=[2, 2], data_offsets=[0, len(raw) - 8])}
        header["bias"] = entry(shape=[2], data_offsets=[len(raw) - 8, len(raw)])
        write(tmp_path / "model.safetensors", header, raw)
    words = r"weight: integers or complex numbers in the checkpoint, torch\.float32"
    with pytest.raises(CheckpointMismatchError, match=words):
        load_checkpoint_in_model(model, tmp_path)
    assert torch.equal(model.weight, before)


@pytest.mark.slow
def test_every_damage_to_a_pickle_names_the_file(tmp_path: Path) -> None:
    """Wherever a `.bin` is cut or changed, it is read as a state dict or refused by accel's error."""
    torch.save({"weight": torch.ones(2, 2)}, tmp_path / "whole.bin")
    whole, path = (tmp_path / "whole.bin").read_bytes(), tmp_path / "x.bin"
    changed = [whole[:length] for length in range(0, len(whole), 37)]
    changed += [
        whole[:place] + bytes([value]) + whole[place + 1 :] for place in range(0, len(whole), 23) for value in (0, 255)
    ]
    refused = 0
    for content in changed:
        path.write_bytes(content)
        try:
            load_state_dict(path)
        except AccelError as error:
            refused += "x.bin" in str(error)
        else:
            refused += 1
    assert refused == len(changed)


@pytest.mark.parametrize("file", ["\ud800.bin", "x" * 300 + ".safetensors", "a/" * 3000 + "b"])
def test_names_that_no_file_can_have_are_missing_files(file: str, tmp_path: Path) -> None:
    """An index that names a shard which no folder can hold is refused as one whose shard is missing."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": file}}))
    with pytest.raises(CheckpointNotFoundError, match=r"index\.json"):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path)
    with pytest.raises(CheckpointNotFoundError):
        load_state_dict(os.path.join(tmp_path, file))


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json"])
def test_a_save_that_was_killed_after_its_commit_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder without its index, as a kill leaves it, is read as the save that was committed, in place or copied."""
    torch.manual_seed(0)
    old, new = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    save_model(old, None, tmp_path, max_shard_size=80)

    def killed(target: Path) -> None:
        if commit.standing(target) != target:
            (target / "model.safetensors.index.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(commit, "_place", killed)
        with pytest.raises(KeyboardInterrupt):
            save_model(new, None, tmp_path, max_shard_size=80)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    load_checkpoint_in_model(model, tmp_path / name, strict=True)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in new.state_dict().items())
    x = torch.ones(1, 4)
    model = load_checkpoint_and_dispatch(model, tmp_path / name, device_map={"0": "cpu", "1": "disk"})
    assert torch.equal(model(x), new(x))
    save_model(old, None, tmp_path, max_shard_size=80)
    assert torch.equal(model(x), new(x))
    load_checkpoint_in_model(again := nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tmp_path / name, strict=True)
    assert torch.equal(again(x), old(x))
