"""Files of tensors and plain objects: whole, damaged, hostile."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from accel_core.checkpoint import pickles, tensor_file
from accel_core.checkpoint.digest import digest_of
from accel_core.errors import AccelError, CheckpointDamagedError, CheckpointError, UnsafeCheckpointError
from accel_testing import requires


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /nowhere/executed",)


TENSORS = {
    "b.half": torch.arange(5, dtype=torch.float16),
    "a.float": torch.randn(3, 4),
    "transposed": torch.randn(3, 4).t(),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "flag": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 3),
    "brain": torch.randn(7).bfloat16(),
    "eight": torch.randn(4).to(torch.float8_e4m3fn),
    "complex": torch.randn(2, dtype=torch.complex64),
    "unsigned": torch.tensor([2**63 + 1], dtype=torch.uint64),
}


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return bytes(tensor_file.memory_of(tensor.contiguous()))


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    """The reference reader gives back every dtype and stride, and the entry describes the file."""
    entry = tensor_file.write_tensors(tmp_path / "model.safetensors", TENSORS, rank=3)
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert raw(loaded[name]) == raw(tensor)
    assert entry.size == (tmp_path / "model.safetensors").stat().st_size
    assert entry.digest == digest_of(tmp_path / "model.safetensors")
    assert entry.rank == 3


@requires("numpy")  # safetensors writes through it
def test_what_safetensors_writes_is_read(tmp_path: Path) -> None:
    """Files of the reference writer are read, into fresh memory and into tensors that exist."""
    whole = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    safetensors.torch.save_file(whole, tmp_path / "x.safetensors")
    file = tensor_file.TensorFile(tmp_path, "x.safetensors")
    for name, tensor in whole.items():
        assert raw(file.read(name)) == raw(tensor)
        for destination in (torch.zeros_like(tensor), torch.zeros(tensor.shape[::-1], dtype=tensor.dtype).t()):
            if destination.shape == tensor.shape:
                file.read_into(name, destination)
                assert raw(destination) == raw(tensor)


def test_tensors_of_one_memory_are_stored_once(tmp_path: Path) -> None:
    """A second name becomes an alias; views of different extent are stored on their own."""
    base = torch.arange(6.0)
    tensor_file.write_tensors(tmp_path / "x", {"a": base, "b": base, "part": base[:3], "copy": base.clone()})
    file = tensor_file.TensorFile(tmp_path, "x")
    assert set(file.tensors) == {"a", "part", "copy"}
    assert file.aliases == {"b": "a"}
    assert torch.equal(file.read("b"), base)
    assert torch.equal(file.read("part"), base[:3])


@pytest.mark.parametrize("value", [torch.empty(2, device="meta"), "words", torch.zeros(1, dtype=torch.complex128)])
def test_what_has_no_data_is_refused_before_a_file_is_complete(value: Any, tmp_path: Path) -> None:
    """The error names the tensor."""
    with pytest.raises(CheckpointError, match=r"'layer\.x' is a"):
        tensor_file.write_tensors(tmp_path / "x", {"layer.x": value})


def test_numbers_of_numpy_come_back(tmp_path: Path) -> None:
    """A learning rate that NumPy computed does not make a checkpoint unreadable."""
    np = pytest.importorskip("numpy", reason="needs numpy, which accel-core does not")
    content = {"lr": np.float64(0.5), "count": np.int64(3), "words": np.arange(4, dtype=np.uint32)}
    pickles.write_object(tmp_path / "x.bin", content)
    loaded = pickles.read_object(tmp_path, "x.bin")
    assert loaded["lr"] == 0.5
    assert loaded["words"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("form", ["zip", "legacy", "bare"])
def test_malicious_pickles_are_refused_by_name(form: str, tmp_path: Path) -> None:
    """Nothing is executed, in whichever form the pickle comes."""
    path = tmp_path / "optimizer.bin"
    if form == "bare":
        path.write_bytes(pickle.dumps(Evil(), protocol=2))
    else:
        torch.save({"x": Evil()}, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(UnsafeCheckpointError, match=r"optimizer\.bin"):
        pickles.read_object(tmp_path, "optimizer.bin")


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("form", ["archive", "before 1.6", "pickle.dump"])
def test_later_pickle_protocols_are_named(form: str, protocol: int, tmp_path: Path) -> None:
    """The error says what the file is, and what it advises writes a file that loads."""
    state, path = {"weight": torch.ones(2)}, tmp_path / "pytorch_model.bin"
    if form == "pickle.dump":
        path.write_bytes(pickle.dumps({"epoch": 3}, protocol=protocol))
    else:
        torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=form == "archive")
    with pytest.raises(CheckpointDamagedError, match=r"protocol 4 or later.*`torch\.save\(state, path\)`"):
        pickles.read_object(tmp_path, path.name)
    torch.save(state, path)
    assert torch.equal(pickles.read_object(tmp_path, path.name)["weight"], state["weight"])


def test_objects_of_own_classes_are_refused_when_saved(tmp_path: Path) -> None:
    """A state that could not be restored is not saved silently; a declared class is."""
    with pytest.raises(UnsafeCheckpointError, match="registered object 0"):
        pickles.prove_readable({"x": Evil()}, "registered object 0")
    with torch.serialization.safe_globals([Path, type(tmp_path)]):
        pickles.prove_readable({"x": tmp_path}, "registered object 0")


@pytest.mark.slow
def test_every_truncation_is_damage(tmp_path: Path) -> None:
    """However much of a file is missing, the error is ours and names the file."""
    tensor_file.write_tensors(tmp_path / "a.safetensors", {"x": torch.ones(3)})
    pickles.write_object(tmp_path / "a.bin", {"x": torch.ones(3)})
    tensors, plain = (tmp_path / "a.safetensors").read_bytes(), (tmp_path / "a.bin").read_bytes()
    for length in range(len(tensors)):
        (tmp_path / "cut.safetensors").write_bytes(tensors[:length])
        with pytest.raises(CheckpointDamagedError, match=r"cut\.safetensors"):
            tensor_file.TensorFile(tmp_path, "cut.safetensors")
    for length in range(0, len(plain), 7):
        (tmp_path / "cut.bin").write_bytes(plain[:length])
        with pytest.raises(AccelError, match=r"cut\.bin"):
            pickles.read_object(tmp_path, "cut.bin")


class Known:
    """A class that a user allows to be read."""

    def __init__(self) -> None:
        self.count = 3


def test_a_class_on_the_list_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object is refused until its class is appended to the list of what readers allow."""
    pickles.write_object(tmp_path / "object.bin", {"known": Known()})
    with pytest.raises(UnsafeCheckpointError, match="Known"):
        pickles.read_object(tmp_path, "object.bin")
    monkeypatch.setattr(pickles, "TORCH_SAFE_GLOBALS", [*pickles.TORCH_SAFE_GLOBALS, Known])
    assert pickles.read_object(tmp_path, "object.bin")["known"].count == 3
