"""What a pickled file can do with torch's names: rebuild tensors inside their storages, and nothing else."""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from crafted import Named, Storage, Word, encode, program_of, write

from accel_core.checkpoint import pickles
from accel_core.checkpoint.plain import load
from accel_core.errors import CheckpointDamagedError, CheckpointNotFoundError, UnsafeCheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR"),
    pytest.mark.filterwarnings("ignore:torch.quantize"),
    pytest.mark.filterwarnings("ignore:TypedStorage"),
]


def tensor(kind: str, key: str, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Named:
    """Return a crafted tensor over the 64 bytes of a storage."""
    width = torch.serialization.StorageType(kind).dtype.itemsize
    return Named(
        "torch._utils", "_rebuild_tensor_v2", Storage(kind, key, 64 // width), offset, size, stride, False,
        Named("collections", "OrderedDict"),
    )  # fmt: skip


_HOOKS = Named("collections", "OrderedDict")
_FLOATS, _LONGS = tensor("FloatStorage", "a", (4,), (1,)), tensor("LongStorage", "b", (4,), (1,))
_COMPRESSED = (tensor("LongStorage", "b", (3,), (1,)), _LONGS, _FLOATS, (2, 2))
_QUANTIZED = Storage("QInt8Storage", "a", 64)
_ATTACKS: dict[str, Any] = {
    "tensor of unwritten memory": Named("torch", "Tensor", 4096),
    "typed tensor of unwritten memory": Named("torch", "FloatTensor", 4096),
    "storage of unwritten memory": Named("torch.storage", "UntypedStorage", 4096),
    "typed storage of unwritten memory": Named("torch", "FloatStorage", 4096),
    "unwritten memory by way of a type": Named(
        "torch._tensor", "_rebuild_from_type_v2", Word("torch", "Tensor"), Word("torch", "Tensor"), (4096,), {}
    ),
    "zeros that the file does not hold": Named("builtins", "bytearray", 2**27),
    "a tensor behind its storage": tensor("FloatStorage", "a", (17,), (1,)),
    "a tensor far behind its storage": tensor("FloatStorage", "a", (2,), (2**30,)),
    "a tensor before its storage": tensor("FloatStorage", "a", (4,), (1,), -4),
    "a tensor that runs backwards": tensor("FloatStorage", "a", (4,), (-1,)),
    "a negative size": tensor("FloatStorage", "a", (-4,), (1,)),
    "sizes whose product overflows": tensor("FloatStorage", "a", (2**31 - 1,) * 3, (2**31 - 1, 1, 1)),
    "sparse with indices outside": Named(
        "torch._utils", "_rebuild_sparse_tensor", Named("torch.serialization", "_get_layout", "torch.sparse_coo"),
        (tensor("LongStorage", "b", (1, 4), (4, 1)), _FLOATS, (2,), False),
    ),
    "compressed with indices outside": Named(
        "torch._utils", "_rebuild_sparse_tensor", Named("torch.serialization", "_get_layout", "torch.sparse_csr"),
        _COMPRESSED,
    ),
    "nested with offsets outside": Named("torch._utils", "_rebuild_nested_tensor", _FLOATS, _LONGS, _LONGS, _LONGS),
    "quantized with too few scales": Named(
        "torch._utils", "_rebuild_qtensor", _QUANTIZED, 0, (4, 4), (4, 1),
        (Word("torch", "per_channel_affine"), tensor("DoubleStorage", "a", (1,), (1,)), _LONGS, 0), False, _HOOKS,
    ),
    "quantized along an axis outside": Named(
        "torch._utils", "_rebuild_qtensor", _QUANTIZED, 0, (4, 4), (4, 1),
        (Word("torch", "per_channel_affine"), tensor("DoubleStorage", "a", (4,), (1,)), _LONGS, 7), False, _HOOKS,
    ),
    "quantized and broadcast to terabytes": Named(
        "torch._utils", "_rebuild_qtensor", _QUANTIZED, 0, (2**30, 2**10), (0, 0),
        (Word("torch", "per_tensor_affine"), 1.0, 0), False, _HOOKS,
    ),
    "a wrapper of nobody's": Named("torch._utils", "_rebuild_wrapper_subclass", Word("torch", "Tensor")),
    "attributes that hide a tensor's": Named(
        "torch._tensor", "_rebuild_from_type_v2", Word("torch._utils", "_rebuild_tensor_v2"), Word("torch", "Tensor"),
        _FLOATS.arguments, {"detach": 1},
    ),
    "attributes that hide a mapping's": Named("collections", "OrderedDict", state={"items": 1}),
    "a hook": Named(
        "torch._utils", "_rebuild_parameter", _FLOATS, True, Named("collections", "OrderedDict", ((1, 2),))
    ),
}  # fmt: skip


@pytest.mark.parametrize("attack", _ATTACKS)
def test_no_file_reaches_memory_that_is_not_its_own(attack: str, tmp_path: Path) -> None:
    """Each crafted constructor, tensor and container is refused by the name of the file, by both readers."""
    write(tmp_path / "x.pkl", program_of(_ATTACKS[attack]), a=b"\x7f" * 64, b=b"\x7f" * 64)
    for options in ({}, {"mmap": True}):
        with pytest.raises((UnsafeCheckpointError, CheckpointDamagedError), match=r"x\.pkl"):
            pickles.read_object(tmp_path, "x.pkl", **options)
        with pytest.raises((UnsafeCheckpointError, CheckpointDamagedError), match=r"x\.pkl"):
            load(tmp_path / "x.pkl", **options)


def test_a_refused_sparse_tensor_leaves_no_trace(tmp_path: Path) -> None:
    """Torch's lists are as before, whatever was refused, and the next sparse tensor is read."""
    names, checked = (
        set(torch.serialization.get_safe_globals()),
        torch.sparse.check_sparse_tensor_invariants.is_enabled(),
    )
    write(tmp_path / "x.pkl", program_of(_ATTACKS["compressed with indices outside"]), a=b"\x7f" * 64, b=b"\x7f" * 64)
    with pytest.raises(CheckpointDamagedError):
        pickles.read_object(tmp_path, "x.pkl")
    sparse = torch.eye(3).to_sparse()
    pickles.write_object(tmp_path / "y.pkl", {"coo": sparse, "csr": sparse.to_sparse_csr()})
    found = pickles.read_object(tmp_path, "y.pkl")
    assert all(torch.equal(one.to_dense(), torch.eye(3)) for one in found.values())
    assert set(torch.serialization.get_safe_globals()) == names
    assert torch.sparse.check_sparse_tensor_invariants.is_enabled() == checked


class Marked(torch.Tensor):
    """A class of tensors that a user declares."""


def _marked() -> torch.Tensor:
    made = torch.arange(3.0)
    made.mark = "kept"  # type: ignore[attr-defined]
    return made


_CONTENTS: dict[str, Callable[[], Any]] = {
    "tensors of all kinds": lambda: {
        "strided": torch.arange(12.0).view(3, 4).t(),
        "part": torch.arange(12.0)[3:7],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "half": torch.ones(2).bfloat16(),
        "flag": torch.tensor([True, False]),
        "complex": torch.ones(2, dtype=torch.complex64),
        "long": torch.tensor(7),
        "empty": torch.empty(0, 3),
    },
    "containers": lambda: [OrderedDict(a=1), Counter("aab"), {1, 2}, 1j, bytearray(b"\x00\xff"), bytearray(), b"\xff"],
    "names": lambda: (torch.float16, torch.Size([1, 2]), torch.device("cpu"), None, True, 2**70, -1, 0.5, "é"),
    "a tensor with attributes": lambda: {"x": _marked()},
    "a state dict": lambda: torch.nn.BatchNorm1d(2).state_dict(),
}


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("kind", _CONTENTS)
def test_what_torch_writes_is_read(kind: str, new: bool, tmp_path: Path) -> None:
    """Tensors, containers and names come back as torch itself reads them, in both of its formats."""
    content = _CONTENTS[kind]()
    torch.save(content, tmp_path / "x.pkl", _use_new_zipfile_serialization=new)
    found = pickles.read_object(tmp_path, "x.pkl")
    wanted = torch.load(tmp_path / "x.pkl", weights_only=True)
    assert repr(found) == repr(wanted)
    assert type(found) is type(wanted)
    assert getattr(found, "_metadata", None) == getattr(wanted, "_metadata", None)
    if kind == "a tensor with attributes":
        assert found["x"].mark == "kept"
    assert repr(load(tmp_path / "x.pkl")) == repr(wanted)
    assert repr(load(io.BytesIO((tmp_path / "x.pkl").read_bytes()))) == repr(wanted)


def test_what_only_the_archive_holds_is_read(tmp_path: Path) -> None:
    """Dtypes without a storage class, sparse, quantized and empty tensors come back."""
    content = {
        "eight": torch.ones(3).to(torch.float8_e4m3fn),
        "unsigned": torch.tensor([2**63], dtype=torch.uint64),
        "quantized": torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8),
        "channels": torch.quantize_per_channel(
            torch.eye(2), torch.tensor([0.5, 0.25]).double(), torch.tensor([0, 1]), 0, torch.qint8
        ),
        "meta": torch.empty(2, 3, device="meta"),
    }
    torch.save(content, tmp_path / "x.pkl")
    wanted = torch.load(tmp_path / "x.pkl", weights_only=True)
    assert repr(pickles.read_object(tmp_path, "x.pkl")) == repr(wanted)


def test_shared_storages_of_the_old_format_stay_shared(tmp_path: Path) -> None:
    """Two tensors over one storage are over one storage after they were read."""
    base = torch.arange(6.0)
    torch.save({"a": base, "b": base[2:4]}, tmp_path / "x.pkl", _use_new_zipfile_serialization=False)
    found = pickles.read_object(tmp_path, "x.pkl")
    found["a"][2] = 7
    assert found["b"].tolist() == [7, 3]


@pytest.mark.parametrize("crime", ["no storages", "a storage larger than the file", "cut"])
def test_the_old_format_shows_no_unwritten_memory(crime: str, tmp_path: Path) -> None:
    """A file that leaves its storages out, or announces more than it holds, is refused."""
    magic, protocol = torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION
    parts = [pickle.dumps(one, 2) for one in (magic, protocol, {"little_endian": True})]
    count = 2**30 if crime == "a storage larger than the file" else 16
    storage = b"(" + b"".join(map(encode, ("storage", Word("torch", "FloatStorage"), "k", "cpu", count, None))) + b"tQ"
    function = Word("torch._utils", "_rebuild_tensor_v2")
    rest = b"".join(map(encode, (0, (count,), (1,), False, _HOOKS)))
    parts.append(b"\x80\x02" + encode(function) + b"(" + storage + rest + b"tR.")
    keys = [] if crime == "no storages" else ["k"]
    content = b"" if crime == "no storages" else struct.pack("<q", count) + bytes(60 if crime == "cut" else 64)
    (tmp_path / "x.pkl").write_bytes(b"".join(parts) + pickle.dumps(keys, 2) + content)
    for read in (lambda: pickles.read_object(tmp_path, "x.pkl"), lambda: load(tmp_path / "x.pkl")):
        with pytest.raises(CheckpointDamagedError, match=r"x\.pkl.*(storage|unexpected EOF)"):
            read()


def test_a_class_that_the_user_declared_is_read(tmp_path: Path) -> None:
    """A tensor of a declared class comes back as one, and of any other is refused."""
    torch.save({"x": torch.ones(2).as_subclass(Marked)}, tmp_path / "x.pkl")
    with pytest.raises(UnsafeCheckpointError, match="Marked"):
        pickles.read_object(tmp_path, "x.pkl")
    with torch.serialization.safe_globals([Marked]):
        assert type(pickles.read_object(tmp_path, "x.pkl")["x"]) is Marked


@pytest.mark.parametrize("place", ["absent", "folder", "device"])
def test_what_is_no_file_is_refused_by_name(place: str, tmp_path: Path) -> None:
    """A path where nothing is, a folder and a device are named by an error of accel's."""
    path = {"absent": tmp_path / "x.pkl", "folder": tmp_path, "device": Path("/dev/zero")}[place]
    with pytest.raises((CheckpointNotFoundError, UnsafeCheckpointError), match=path.name):
        load(path)


_FUZZ = """
import random, sys, zipfile
from pathlib import Path
import torch
from accel_core.checkpoint import pickles
from accel_core.checkpoint.plain import load
from accel_core.errors import AccelError

def touch(value, seen):
    if id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            value = value.to_dense() if value.numel() < 1 << 20 else torch.zeros(1)
        if value.is_quantized:
            value = value.dequantize()
        if value.device.type != "meta" and value.numel() < 1 << 20:
            value.clone().view(-1)
    elif type(value).__module__ == "numpy":
        assert not value.dtype.hasobject, value.dtype
        if value.nbytes < 1 << 24:
            bytes(value.tobytes())
    elif isinstance(value, dict):
        for item in value.values():
            touch(item, seen)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            touch(item, seen)

folder, seed, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with zipfile.ZipFile(folder / "seed.pkl") as archive:
    members = {name: archive.read(name) for name in archive.namelist()}
data = next(name for name in members if name.endswith("data.pkl"))
legacy = (folder / "legacy.pkl").read_bytes()
chance, refused, read = random.Random(seed), 0, 0

def mutated(content):
    content = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 4))):
        kind, place = chance.randrange(4), chance.randrange(len(content))
        if kind == 0:
            content[place] = chance.randrange(256)
        elif kind == 1:
            del content[place : place + chance.randrange(1, 9)]
        elif kind == 2:
            other = chance.randrange(len(content))
            content[place:place] = content[other : other + chance.randrange(1, 40)]
        else:
            content[place] ^= 1 << chance.randrange(8)
    return bytes(content)

for number in range(rounds):
    path = folder / "x.pkl"
    if number % 4:
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, mutated(content) if name == data else content)
    else:
        path.write_bytes(mutated(legacy))
    try:
        touch(pickles.read_object(folder, "x.pkl", mmap=bool(number % 3)) if number % 2 else load(path), {})
        read += 1
    except AccelError as error:
        assert "x.pkl" in str(error), error
        refused += 1
print(read, refused)
"""


@pytest.mark.slow
def test_mutated_pickles_never_end_the_process(tmp_path: Path) -> None:
    """Mutations of a file with arrays and tensors are read or refused by name, in a process that lives on."""
    np = pytest.importorskip("numpy", reason="needs numpy, which accel-core does not")
    plain = {"tensor": torch.arange(6.0).view(2, 3), "words": ["a", (1, 2.5, None)], "bytes": b"\x00\xff"}
    arrays = {"f": np.arange(3.0), "u": np.arange(6, dtype=np.uint32).reshape(2, 3), "s": np.array([b"ab", b"c"])}
    scalars = {"one": np.float32(1), "big": np.array([1], dtype=">i4"), "text": np.array("abc")}
    sparse = torch.eye(3).to_sparse()
    more = {"sparse": sparse, "csr": sparse.to_sparse_csr(), "parameter": torch.nn.Parameter(torch.ones(2))}
    torch.save({**plain, **arrays, **scalars, **more}, tmp_path / "seed.pkl")
    torch.save({**plain, **arrays}, tmp_path / "legacy.pkl", _use_new_zipfile_serialization=False)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FUZZ, str(tmp_path), "0", "400"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    read, refused = map(int, done.stdout.split())
    assert read + refused == 400
    assert min(read, refused) > 3


def test_threads_read_at_the_same_time(tmp_path: Path) -> None:
    """Many threads that read arrays never see one another's list of allowed names."""
    np = pytest.importorskip("numpy", reason="needs numpy, which accel-core does not")
    pickles.write_object(tmp_path / "x.pkl", {"a": np.arange(3), "t": torch.ones(2)})
    before = set(torch.serialization.get_safe_globals())
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: pickles.read_object(tmp_path, "x.pkl")["a"].tolist(), range(200)))
    assert found == [[0, 1, 2]] * 200
    assert set(torch.serialization.get_safe_globals()) == before
