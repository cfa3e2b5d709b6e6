"""Whole weights from folders of shards that `torch.distributed.checkpoint` wrote."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

from accel_core.checkpoint.tensor_file import TensorFile
from accel_core.checkpoint.weights import load_model
from accel_core.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    MissingDependencyError,
    UnsafeCheckpointError,
)
from accel_core.options import engines as table
from accel_parallel.checkpoint import merge
from accel_parallel.checkpoint.merge import merge_weights

NAME = "pytorch_model_fsdp_0"


def write(folder: Path, state: dict[str, Any]) -> Path:
    """Write a folder of shards from one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)
    return folder


def everything(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder with their content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_files_are_as_large_as_asked(tmp_path: Path) -> None:
    """Weights go into several files with an index where they are larger, and earlier ones are gone with it."""
    state = {name: torch.randn(10, 10) for name in "abc"}
    folder = write(tmp_path / NAME, {"model": state})
    merge_weights(folder, tmp_path / "whole", max_shard_size=900)
    index = json.loads((tmp_path / "whole" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 1200
    files = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    assert sorted(set(index["weight_map"].values())) == files
    merge_weights(folder, tmp_path / "whole")
    assert [path.name for path in (tmp_path / "whole").iterdir()] == ["model.safetensors"]
    torch.testing.assert_close(load_file(tmp_path / "whole" / "model.safetensors"), state, rtol=0, atol=0)


def test_equal_matrices_are_one_and_equal_beginnings_are_not(tmp_path: Path) -> None:
    """A model with ties loads what was stored once; zeros, ones, vectors and nearly equal matrices stay apart."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.head.weight = self.words.weight

    model, other = Tied(), Tied()
    merge_weights(write(tmp_path / "tied", {"model": model.state_dict()}), tmp_path / "whole")
    assert list(load_file(tmp_path / "whole" / "model.safetensors")) == ["words.weight"]
    load_model(other, tmp_path / "whole")
    assert torch.equal(other.head.weight, model.words.weight)
    nearly = torch.randn(4, 4)
    state = {
        **{f"zeros{number}": torch.zeros(4, 4) for number in range(2)},
        **{f"vector{number}": torch.arange(5.0) for number in range(2)},
        "nearly": nearly,
        "nearer": torch.where(torch.eye(4) == 1, -nearly, nearly),
    }
    merge_weights(write(tmp_path / "apart", {"model": state}), tmp_path / "all")
    torch.testing.assert_close(load_file(tmp_path / "all" / "model.safetensors"), state, rtol=0, atol=0)


def test_weights_without_a_root_and_beside_an_optimizer(tmp_path: Path) -> None:
    """A bare state dict is merged under its names; of a whole run's folder, the model is."""
    state = {"a.weight": torch.randn(2, 2)}
    run = {"model": state, "optimizer": {"state": {"a.weight": {"exp_avg": torch.ones(2, 2)}}}, "step": 3}
    for number, content in enumerate((state, run)):
        merge_weights(write(tmp_path / f"run{number}", content), tmp_path / f"whole{number}")
        torch.testing.assert_close(load_file(tmp_path / f"whole{number}" / "model.safetensors"), state, rtol=0, atol=0)


def test_an_optimizer_is_refused_and_a_parent_leads_to_its_model(tmp_path: Path) -> None:
    """The folder of an optimizer is refused; of a checkpoint its one model is merged, and several are named."""
    ones = {"a": torch.ones(2)}
    model = write(tmp_path / "run" / NAME, {"model": ones})
    optimizer = write(tmp_path / "run" / "optimizer_0", {"optimizer": {"state": {"a": {"exp_avg": torch.ones(2)}}}})
    with pytest.raises(CheckpointMismatchError, match=r"got the state of an optimizer\. Pass .*pytorch_model_fsdp_0"):
        merge_weights(optimizer, tmp_path / "whole")
    merge_weights(tmp_path / "run", tmp_path / "merged")
    torch.testing.assert_close(load_file(tmp_path / "merged" / "model.safetensors"), ones, rtol=0, atol=0)
    other = write(tmp_path / "run" / "pytorch_model_fsdp_1", {"model": ones})
    with pytest.raises(CheckpointMismatchError, match=rf"of one model are merged; .* Pass {model} or {other}\."):
        merge_weights(tmp_path / "run", tmp_path / "whole")
    shutil.rmtree(model)
    shutil.rmtree(other)
    for nothing in ("run", "nowhere"):
        with pytest.raises(CheckpointNotFoundError):
            merge_weights(tmp_path / nothing, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda folder: (folder / "__0_0.distcp").unlink(), r"__0_0\.distcp is not there; it holds model\.a"),
        (lambda folder: os.truncate(folder / "__0_0.distcp", 99), r"__0_0\.distcp has 99 bytes"),
        (lambda folder: (folder / "__1_0.distcp").touch(), r"__1_0\.distcp is in no list"),
        (
            lambda folder: shutil.copy(
                write(folder.parent / "other", {"model": {"a": torch.ones(9, 9)}}) / "__0_0.distcp", folder
            ),
            r"is not the one that its list describes|is damaged",
        ),
    ],
)
def test_shards_of_several_saves_are_refused(tmp_path: Path, change: Any, found: str) -> None:
    """A missing, short, foreign or surplus shard is an error, and what the target held before is as it was."""
    folder = write(tmp_path / NAME, {"model": {"a": torch.randn(4, 4)}})
    merge_weights(folder, tmp_path / "whole")
    before = everything(tmp_path / "whole")
    change(folder)
    with pytest.raises(CheckpointDamagedError, match=found):
        merge_weights(folder, tmp_path / "whole")
    assert everything(tmp_path / "whole") == before


def test_nothing_runs_and_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    """A list that names a function is refused by name; so is a value that safetensors cannot hold."""
    folder = write(tmp_path / NAME, {"model": {"a": torch.ones(2), "extra": {"b": "text"}}})
    with pytest.raises(CheckpointError, match=r"'extra\.b' is a str"):
        merge_weights(folder, tmp_path / "whole")
    (folder / ".metadata").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(UnsafeCheckpointError):
        merge_weights(folder, tmp_path / "whole")
    assert not list((tmp_path / "whole").glob("*")) if (tmp_path / "whole").exists() else True


def test_pieces_reach_the_file_bit_by_bit(tmp_path: Path) -> None:
    """Long pieces, transposed and conjugated ones, parts of others, booleans, numbers and nothing are as they were."""
    base = torch.randn(700, 500)
    state = {
        "long": torch.arange(1_500_000, dtype=torch.int32).reshape(1500, 1000),
        "half": base.bfloat16(),
        "transposed": base.T,
        "part": base[100:200],
        "turned": torch.randn(3, 3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, 3, dtype=torch.complex64).conj().imag,
        "flags": base > 0,
        "number": torch.tensor(3.5),
        "nothing": torch.empty(0, 4),
    }
    merge_weights(write(tmp_path / NAME, {"model": state}), tmp_path / "whole")
    file = TensorFile(tmp_path / "whole", "model.safetensors")  # older releases of safetensors read no complex numbers
    torch.testing.assert_close({name: file.read(name) for name in state}, state, rtol=0, atol=0)


def test_a_piece_whose_archive_lies_is_refused(tmp_path: Path) -> None:
    """A storage of another length than the tensor says is damage, whether its bytes are streamed or read."""
    folder = write(tmp_path / NAME, {"model": {"a": torch.randn(64, 64)}})
    (shard,) = folder.glob("*.distcp")
    raw = shard.read_bytes()
    assert raw.count(b"M\x00\x10") == 1  # 4096 values, in the pickle of the tensor
    shard.write_bytes(raw.replace(b"M\x00\x10", b"M\x00\x20"))
    with pytest.raises(CheckpointDamagedError, match=r"__0_0\.distcp"):
        merge_weights(folder, tmp_path / "whole")
    assert not list((tmp_path / "whole").glob("*.safetensors"))


def test_weights_of_an_engine_without_its_package_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only an engine reads, as a folder or inside a checkpoint, is one error with the package, and no file."""
    for module in (table, merge):
        monkeypatch.setattr(module, "engines", lambda: {engine.name: engine for engine in table.BUILT_IN})
    folder = tmp_path / "checkpoint" / "pytorch_model"
    folder.mkdir(parents=True)
    (folder / "mp_rank_00_model_states.pt").touch()
    for source in (folder, folder.parent):
        with pytest.raises(MissingDependencyError, match=r"accel-deepspeed is not installed.*pip install accel-deep"):
            merge_weights(source, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
