"""Offload folders are read and written in the documented format."""

import errno
import gc
import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accel_bigmodel import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from accel_core.errors import ConfigurationError, OffloadError, UnsafeCheckpointError

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
    """Saving an index adds to the one that is there; a file of another size than its entry says is named."""
    index = offload_weight(torch.ones(1), "a", tmp_path, index={})
    assert index is not None
    save_offload_index(index, tmp_path)
    save_offload_index({}, tmp_path)
    save_offload_index({"b": {"dtype": "float32", "shape": [1]}}, tmp_path)
    assert set(json.loads((tmp_path / "index.json").read_text())) == {"a", "b"}
    assert offload_weight(torch.ones(1), "c", tmp_path) is None
    (tmp_path / "a.dat").write_bytes(b"123")
    with pytest.raises(OffloadError, match=r"incomplete.*3 bytes.*a\.dat"):
        load_offloaded_weight(tmp_path / "a.dat", index["a"])


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


@pytest.mark.parametrize("name", ["../evil", "/x-absolute", "a/../../b", "a\0b", "a\\b", "../"])
def test_names_that_lead_out_are_refused_on_the_way_in(name: str, tmp_path: Path) -> None:
    """Neither a weight nor an index of such a name is written, nor anything beside it."""
    folder = tmp_path / "in" / "folder"
    with pytest.raises(UnsafeCheckpointError, match="leads outside"):
        offload_state_dict(folder, {"fine": torch.ones(1), name: torch.ones(1)})
    assert list(tmp_path.iterdir()) == []
    folder.mkdir(parents=True)
    with pytest.raises(UnsafeCheckpointError, match="leads outside"):
        offload_weight(torch.ones(1), name, folder)
    with pytest.raises(UnsafeCheckpointError, match="leads outside"):
        save_offload_index({name: {"dtype": "float32", "shape": [1]}}, folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "index",
    [
        {"../secret": {"dtype": "float32", "shape": [1]}},
        {"x": {"dtype": "float32", "shape": [1], "dat_file": "../secret.dat"}},
        {"x": {"safetensors_file": "/secret.safetensors", "weight_name": "x"}},
        {"link": {"dtype": "float32", "shape": [1]}},
    ],
)
def test_names_that_lead_out_are_refused_on_the_way_out(index: dict[str, object], tmp_path: Path) -> None:
    """An index on disk that names a file elsewhere, or a link to one, is refused before anything is read."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret.dat").write_bytes(bytes(4))
    (folder / "link.dat").symlink_to(tmp_path / "secret.dat")
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(UnsafeCheckpointError, match=r"index\.json"):
        OffloadedWeightsLoader(save_folder=folder)


def test_a_weight_is_not_written_through_a_link(tmp_path: Path) -> None:
    """A link that lies where a weight goes is refused, and what it points to stays as it was."""
    (tmp_path / "kept").write_bytes(b"mine")
    (tmp_path / "a.dat").symlink_to(tmp_path / "kept")
    with pytest.raises(OffloadError, match="'a'"):
        offload_weight(torch.ones(1), "a", tmp_path)
    assert (tmp_path / "kept").read_bytes() == b"mine"


ENTRIES: list[object] = [
    5, [], {}, {"dtype": "float32"}, {"dtype": 3, "shape": [1]}, {"dtype": "save", "shape": [1]},
    {"dtype": "float32", "shape": [-1]}, {"dtype": "float32", "shape": ["1"]}, {"dtype": "float32", "shape": 1},
    {"dtype": "float32", "shape": [2**63, 2**63]}, {"dtype": "float32", "shape": [0, 2**63]},
    {"dtype": "float32", "shape": [float("inf")]}, {"dat_file": 3},
]  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"", *(json.dumps({"a": entry}).encode() for entry in ENTRIES)],
)
def test_entries_that_are_none_are_refused_by_name(content: bytes, tmp_path: Path) -> None:
    """JSON of another shape, or none, and whatever else an index holds for a weight: the error names the file."""
    (tmp_path / "a.dat").write_bytes(bytes(4))
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(OffloadError, match=r"index\.json|a\.dat"):
        OffloadedWeightsLoader(save_folder=tmp_path)["a"]


@pytest.mark.parametrize("key", ["dat_file", "safetensors_file", None])
def test_names_with_half_a_character_are_refused_by_name(key: str | None, tmp_path: Path) -> None:
    """No file can have such a name, be it of the entry or of the file that it names."""
    entry = {"dtype": "float32", "shape": [1], "weight_name": "a"} | ({key: "half\ud800"} if key else {})
    (tmp_path / "index.json").write_text(json.dumps({"a" if key else "half\ud800": entry}))
    with pytest.raises(OffloadError, match=r"'half\\ud800.*index\.json"):
        OffloadedWeightsLoader(save_folder=tmp_path)


def test_files_beside_the_index_are_found(tmp_path: Path) -> None:
    """Relative files of an index on disk are looked for in its folder, whatever the present one is."""
    save_file({"w": torch.arange(3.0)}, tmp_path / "x.safetensors")
    save_offload_index({"a": {"safetensors_file": "x.safetensors", "weight_name": "w"}}, tmp_path)
    assert OffloadedWeightsLoader(save_folder=tmp_path)["a"].tolist() == [0, 1, 2]
    save_offload_index({"b": {"safetensors_file": "x.safetensors", "weight_name": "w"}}, tmp_path)
    assert OffloadedWeightsLoader(save_folder=tmp_path)["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "part", "conjugate", "negative"])
def test_another_layout_comes_back_equal_and_contiguous(layout: str, tmp_path: Path) -> None:
    """The documented limit of the format: values bit for bit, without the strides that they had."""
    weight = {
        "channels_last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 4).t(),
        "part": torch.randn(4, 4)[:, 1:3],
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
    }[layout]
    offload_state_dict(tmp_path, {"w": weight})
    found = OffloadedWeightsLoader(save_folder=tmp_path)["w"]
    assert torch.equal(found, weight)
    assert found.is_contiguous()


@pytest.mark.slow
def test_more_weights_than_files_may_be_open(tmp_path: Path) -> None:
    """A model of many weights keeps none of their files open, and gives the memory back when it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = {f"layer.{number}": torch.full((3,), float(number)) for number in range(200)}
    offload_state_dict(tmp_path, state)
    gc.collect()
    before = Path("/proc/self/maps").read_text().count(str(tmp_path))
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 50, hard))
    try:
        loader = OffloadedWeightsLoader(save_folder=tmp_path)
        views = {name: loader[name] for name in loader}
        assert all(torch.equal(views[name], value) for name, value in state.items())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    last = views["layer.7"]
    del loader, views
    gc.collect()
    assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == before + 1
    assert torch.equal(last, state["layer.7"])


def test_an_index_that_cannot_be_written_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, what was offloaded before is still there, and no part of a file is left."""
    offload_state_dict(tmp_path, {"a": torch.ones(2)})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OffloadError, match=r"cannot be written; got .*No space left"):
        save_offload_index({"b": {"dtype": "float32", "shape": [2]}}, tmp_path)
    with pytest.raises(OffloadError, match=r"cannot be written; got .*No space left"):
        offload_weight(torch.zeros(2), "a", tmp_path)
    assert torch.equal(OffloadedWeightsLoader(save_folder=tmp_path)["a"], torch.ones(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.dat", "index.json"]
