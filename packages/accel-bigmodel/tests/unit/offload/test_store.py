"""Offload folders are read and written in the documented format."""

import json
from pathlib import Path

import pytest
import torch

from accel_bigmodel import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from accel_core.errors import ConfigurationError, OffloadError

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "c": torch.tensor(3.0),
    "d": torch.tensor([True, False]),
    "e": torch.arange(2),
    "f": torch.ones(2).to(torch.float8_e4m3fn),
    "g": torch.empty(0, 3),
}


def test_every_dtype_and_shape_survives(tmp_path: Path) -> None:
    """Raw values go to `.dat` files, dtype and shape to `index.json`, and come back equal."""
    offload_state_dict(tmp_path / "folder", TENSORS)
    index = json.loads((tmp_path / "folder" / "index.json").read_text())
    assert index["b"] == {"dtype": "bfloat16", "shape": [3]}
    assert (tmp_path / "folder" / "b.dat").stat().st_size == 6
    loader = OffloadedWeightsLoader(save_folder=tmp_path / "folder")
    assert list(loader) == list(TENSORS)
    for name, value in TENSORS.items():
        assert torch.equal(loader[name], value)
        assert loader[name].dtype == value.dtype


def test_an_index_grows(tmp_path: Path) -> None:
    """Saving an index adds to the one that is there; an empty one changes nothing."""
    index = offload_weight(torch.ones(1), "a", tmp_path, index={})
    assert index is not None
    save_offload_index(index, tmp_path)
    save_offload_index({}, tmp_path)
    save_offload_index({"b": {"dtype": "float32", "shape": [1]}}, tmp_path)
    assert set(json.loads((tmp_path / "index.json").read_text())) == {"a", "b"}
    assert offload_weight(torch.ones(1), "c", tmp_path) is None


def test_a_cut_weight_is_refused(tmp_path: Path) -> None:
    """A file of another size than its entry says is named."""
    info = (offload_weight(torch.ones(4), "a", tmp_path, index={}) or {})["a"]
    (tmp_path / "a.dat").write_bytes(b"123")
    with pytest.raises(OffloadError, match=r"not whole.*3 bytes.*a\.dat"):
        load_offloaded_weight(tmp_path / "a.dat", info)


def test_memory_comes_before_the_folder(tmp_path: Path) -> None:
    """Weights in memory hide those of the folder, unknown ones are KeyErrors, and nothing at all is refused."""
    offload_state_dict(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(1)})
    loader = OffloadedWeightsLoader(state_dict={"a": torch.ones(1)}, save_folder=tmp_path)
    assert loader["a"].item() == 1
    assert (len(loader), "b" in loader, "z" in loader) == (2, True, False)
    with pytest.raises(KeyError):
        loader["z"]
    with pytest.raises(ConfigurationError, match="Need either a `state_dict`"):
        OffloadedWeightsLoader()


def test_a_prefix_hides_the_path() -> None:
    """A prefixed view answers short names and lists the whole ones below it."""
    view = PrefixedDataset({"x.a": torch.ones(1), "y.b": torch.zeros(1)}, "x.")
    assert view["a"].item() == 1
    assert list(view) == ["x.a"]
    assert extract_submodules_state_dict({"a.w": 1, "ab.w": 2, "a": 3}, ["a"]) == {"a.w": 1, "a": 3}  # type: ignore[dict-item]
