"""What a file can do with NumPy's names: rebuild plain arrays, and nothing else."""

from __future__ import annotations

import random
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from crafted import Named, New, Word, program_of, write

from accel_core.checkpoint import pickles
from accel_core.checkpoint.plain import load
from accel_core.errors import AccelError, CheckpointDamagedError, UnsafeCheckpointError

np = pytest.importorskip("numpy", reason="needs numpy, which accel-core does not")


def dtype(text: Any, state: Any = None) -> Named:
    """Return a crafted dtype, with a state of the attacker's."""
    return Named("numpy", "dtype", text, False, True, state=state)


def array_of(shape: Any, kind: Any, content: Any) -> Named:
    """Return a crafted array as NumPy pickles one."""
    state = (1, shape, kind, False, content)
    return Named("numpy.core.multiarray", "_reconstruct", Word("numpy", "ndarray"), (0,), b"b", state=state)


_HIDDEN = (3, "|", None, ("f",), {"f": (dtype("O8"), 0)}, 8, 1, 0)
_OBJECT_FIELD = (3, "|", None, ("f",), {"f": (dtype("f8"), 0)}, 8, 1, 0)
_CODES = ["?", "i1", "u1", "<i2", ">i2", "<u4", ">u4", "<i8", "<f2", "<f4", ">f4", "<f8", ">f8", "<c16", "S5", "<U3"]
_ATTACKS: dict[str, Any] = {
    "object field in raw bytes": array_of((1,), dtype("V8", _HIDDEN), b"\x10" * 8),
    "field in a float": array_of((1,), dtype("f8", _OBJECT_FIELD), b"\x10" * 8),
    "field in a text": array_of((1,), dtype("S8", _OBJECT_FIELD), b"\x10" * 8),
    "raw bytes": array_of((1,), dtype("V8"), b"\x10" * 8),
    "objects": array_of((1,), dtype("O8"), b"\x10" * 8),
    "objects from a letter": array_of((1,), dtype("O"), b"\x10" * 8),
    "fields by name": array_of((1,), dtype("f4,O"), b"\x10" * 12),
    "dates": array_of((1,), dtype("M8"), b"\x10" * 8),
    "a longer text": array_of((1,), dtype("S8", (3, "|", None, None, None, 4096, 1, 0)), b"x" * 8),
    "a longer unicode": array_of((1,), dtype("U2", (3, "<", None, None, None, 4096, 4, 8)), b"x" * 8),
    "a longer float": array_of((1,), dtype("f8", (3, "<", None, None, None, 4096, 1, 0)), b"x" * 8),
    "flags": array_of((1,), dtype("f8", (3, "<", None, None, None, -1, -1, 63)), b"x" * 8),
    "subarray": array_of((1,), dtype("f8", (3, "<", (dtype("f8"), (512,)), None, None, -1, -1, 0)), b"x" * 8),
    "dtype that is a dict": array_of((1,), dtype({"names": ("a",), "formats": ("O",)}), b"x" * 8),
    "dtype that is no dtype": array_of((1,), "f8", b"x" * 8),
    "more elements than bytes": array_of((512,), dtype("f8"), b"x" * 8),
    "negative shape": array_of((-1, -1), dtype("f8"), b"x" * 8),
    "huge empty shape": array_of((0, 2**31 - 1, 2**31 - 1, 2**31 - 1), dtype("f8"), b""),
    "content that is a list of objects": array_of((1,), dtype("f8"), (None,)),
    "memory that nobody wrote": Named("numpy", "ndarray", (4096,)),
    "memory that nobody wrote, by new": New("numpy", "ndarray", (4096,)),
    "longer scalar": Named("numpy.core.multiarray", "scalar", dtype("f8"), b"x"),
    "object scalar": Named("numpy.core.multiarray", "scalar", dtype("O8"), b"x" * 8),
    "class of dtypes": Named("numpy.dtypes", "VoidDType", 8),
    "the reader's own dtype": Named("accel_core.checkpoint.arrays", "_PlainDtype"),
}


@pytest.mark.parametrize("attack", _ATTACKS)
@pytest.mark.parametrize("declared", [False, True])
def test_no_file_reaches_the_state_of_a_dtype(attack: str, declared: bool, tmp_path: Path) -> None:
    """Each crafted dtype, array and scalar is refused, also where the user declared NumPy's types as safe."""
    write(tmp_path / "x.pkl", program_of(_ATTACKS[attack]))
    names = [np.dtype, np.ndarray, np.dtypes.VoidDType, np.dtypes.Float64DType, np.dtypes.BytesDType]
    with torch.serialization.safe_globals(names if declared else []):
        before = set(torch.serialization.get_safe_globals())
        with pytest.raises((UnsafeCheckpointError, CheckpointDamagedError), match=r"x\.pkl"):
            pickles.read_object(tmp_path, "x.pkl")
        with pytest.raises((UnsafeCheckpointError, CheckpointDamagedError), match=r"x\.pkl"):
            load(tmp_path / "x.pkl")
        assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.parametrize("code", _CODES)
@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 3), (0, 3)])
def test_plain_arrays_come_back(code: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Each plain dtype, byte order and shape is rebuilt, as an array that owns its memory and can be written."""
    count = int(np.prod(shape, dtype=int))
    array = np.arange(count).astype(code).reshape(shape)
    pickles.write_object(tmp_path / "x.pkl", {"c": array, "fortran": np.asfortranarray(array), "one": [(array,)]})
    found = pickles.read_object(tmp_path, "x.pkl")
    for one, wanted in ((found["c"], array), (found["fortran"], np.asfortranarray(array)), (found["one"][0][0], array)):
        assert type(one) is np.ndarray
        assert one.dtype == array.dtype.newbyteorder("=")  # NumPy swaps what was written elsewhere when it reads
        assert np.array_equal(one, wanted)
        assert one.shape == wanted.shape
        assert one.flags.owndata
        assert one.flags.writeable


def test_what_is_shared_stays_shared(tmp_path: Path) -> None:
    """An array that stands in two places, and a list that holds itself, come back as they were."""
    array, ring = np.arange(3), []  # type: ignore[var-annotated]
    ring.append(ring)
    pickles.write_object(tmp_path / "x.pkl", {"a": array, "b": (array, OrderedDict(c=array)), "ring": ring})
    found = pickles.read_object(tmp_path, "x.pkl")
    assert found["a"] is found["b"][0] is found["b"][1]["c"]
    assert found["ring"][0] is found["ring"]


def test_doubled_lists_are_read_in_the_time_of_one(tmp_path: Path) -> None:
    """A list that holds a list twice, sixty levels deep, is walked once a level."""
    content: list[Any] = [np.arange(2)]
    for _ in range(60):
        content = [content, content]
    pickles.write_object(tmp_path / "x.pkl", content)
    found = pickles.read_object(tmp_path, "x.pkl")
    assert found[0] is found[1]


@pytest.mark.slow
def test_every_single_byte_may_be_wrong(tmp_path: Path) -> None:
    """Whatever byte of a pickled array is changed, it is read as plain data or refused by our error."""
    program = program_of({"a": array_of((2,), dtype("f8", (3, "<", None, None, None, -1, -1, 0)), b"x" * 16)})
    seed = random.Random(0)
    for position in range(2, len(program) - 1):
        for value in {0, 255, *(seed.randrange(256) for _ in range(6))}:
            write(tmp_path / "x.pkl", program[:position] + bytes([value]) + program[position + 1 :])
            refusal, found = "x.pkl", {}
            try:
                found = pickles.read_object(tmp_path, "x.pkl")
            except AccelError as error:
                refusal = str(error)
            assert "x.pkl" in refusal
            items = list(found.values()) if isinstance(found, dict) else []
            for array in [item for item in items if isinstance(item, np.ndarray)]:
                assert array.dtype.kind in "biufcSU"
                assert not array.dtype.hasobject
                assert array.nbytes == 16


@pytest.mark.parametrize("kind", ["deflated", "overlapping"])
def test_an_archive_that_grows_is_refused_before_it_is_unpacked(kind: str, tmp_path: Path) -> None:
    """A member that is compressed, or bytes that several members share, never fill the memory."""
    path = tmp_path / "x.pkl"
    if kind == "deflated":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02]" + b"N0" * (8 << 20) + b".")
    else:
        torch.save({"x": torch.zeros(1 << 12)}, path)
        with zipfile.ZipFile(path, "a") as archive:
            member = max(archive.filelist, key=lambda one: one.file_size)
            archive.filelist += [member] * 8
            archive._didModify = True  # type: ignore[attr-defined]
    with pytest.raises(CheckpointDamagedError, match=r"x\.pkl.*(compressed|announce)"):
        pickles.read_object(tmp_path, "x.pkl")
