"""Weights files: what the safetensors package refuses is refused, what it writes is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_core.checkpoint.tensor_file import DTYPES, TensorFile, memory_of, stream_tensors, write_tensors
from accel_core.errors import CheckpointDamagedError, CheckpointError
from accel_testing.requires import requires


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    """Write a file with a header of one's own."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)


def reference(path: Path) -> dict[str, torch.Tensor] | None:
    """Return what the package reads; `None` where it refuses the file, or torch refuses a tensor of it."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, RuntimeError, TypeError):
        return None


def ours(path: Path) -> dict[str, torch.Tensor] | None:
    """Return what is read here; `None` where the file is refused by its name."""
    try:
        file = TensorFile(path.parent, path.name)
        return {name: file.read(name) for name in file.tensors}
    except CheckpointDamagedError as error:
        return None if path.name in str(error) else {}


def same(found: dict[str, torch.Tensor] | None, wanted: dict[str, torch.Tensor] | None) -> bool:
    """Return whether two readers agree: both refuse, or names, dtypes, shapes and bytes are equal."""
    if found is None or wanted is None:
        return found is wanted
    return found.keys() == wanted.keys() and all(
        one.dtype == wanted[name].dtype
        and one.shape == wanted[name].shape
        and bytes(memory_of(one)) == bytes(memory_of(wanted[name].contiguous()))
        for name, one in found.items()
    )


def entry(**changes: Any) -> dict[str, Any]:
    """Return the description of one float, changed."""
    return {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}


_ONE = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
_EXTRA = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"z":%s}}'
_HEADERS: dict[str, Any] = {
    "plain": {"a": entry()},
    "bom": b"\xef\xbb\xbf" + json.dumps({"a": entry()}).encode(),
    "utf-16": json.dumps({"a": entry()}).encode("utf-16"),
    "spaces": b" " + json.dumps({"a": entry()}).encode() + b" \n\t",
    "nul": json.dumps({"a": entry()}).encode() + b"\0",
    "tensor twice": f'{{"a":{_ONE},"a":{_ONE}}}'.encode(),
    "tensor twice, first elsewhere": f'{{"a":{_ONE.replace("[0,4]", "[4,8]")},"a":{_ONE}}}'.encode(),
    "tensor twice, first broken": f'{{"a":5,"a":{_ONE}}}'.encode(),
    "field twice": b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "unknown field": {"a": entry(extra=[1, {}])},
    "unknown field twice": (_EXTRA % '1,"z":2').encode(),
    "field missing": {"a": {"dtype": "F32", "shape": [1]}},
    "metadata": {"__metadata__": {"x": "y"}, "a": entry()},
    "metadata number": {"__metadata__": {"x": 1}, "a": entry()},
    "metadata null": {"__metadata__": None, "a": entry()},
    "metadata list": {"__metadata__": [], "a": entry()},
    "metadata twice": f'{{"__metadata__":{{}},"__metadata__":{{}},"a":{_ONE}}}'.encode(),
    "metadata key twice": f'{{"__metadata__":{{"a":"b","a":"c"}},"a":{_ONE}}}'.encode(),
    "metadata that is a tensor": {"__metadata__": entry()},
    "float extent": {"a": entry(shape=[1.0])},
    "boolean extent": {"a": entry(shape=[True])},
    "text extent": {"a": entry(shape=["1"])},
    "negative extent": {"a": entry(shape=[-1])},
    "exponent": b'{"a":{"dtype":"F32","shape":[1e0],"data_offsets":[0,4]}}',
    "negative zero": b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}',
    "no shape": {"a": entry(shape=None)},
    "shape as text": {"a": entry(shape="1")},
    "extent beyond 64 bits": {"a": entry(shape=[2**64])},
    "extent of 5,000 digits": (_ONE.join(('{"a":', "}")).replace("[1]", f"[{'1' * 5000}]")).encode(),
    "infinite extent": b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,4]}}',
    "nan": (_EXTRA % "NaN").encode(),
    "number out of range": (_EXTRA % "1e999").encode(),
    "integer out of range": (_EXTRA % ("9" * 400)).encode(),
    "long integer": (_EXTRA % ("9" * 200)).encode(),
    "deep": (_EXTRA % ("[" * 200 + "]" * 200)).encode(),
    "very deep": (_EXTRA % ("[" * 100_000 + "]" * 100_000)).encode(),
    "not so deep": (_EXTRA % ("[" * 20 + "]" * 20)).encode(),
    "half a character": b'{"\\ud800":%s}' % _ONE.encode(),
    "the other half": (_EXTRA % '"\\\\\\udc00"').encode(),
    "two high halves": (_EXTRA % '"\\ud800\\ud800"').encode(),
    "a whole character": b'{"\\ud83d\\ude00":%s}' % _ONE.encode(),
    "an escaped escape": b'{"\\\\ud800":%s}' % _ONE.encode(),
    "line break in a name": b'{"a\nb":%s}' % _ONE.encode(),
    "not utf-8": b'{"\xff":%s}' % _ONE.encode(),
    "accent": '{"é":%s}'.replace("%s", _ONE).encode(),
    "nothing": b"{}",
    "list": [["a", entry()]],
    "number": b"1",
    "empty": b"",
    "hole": {"a": entry(data_offsets=[4, 8])},
    "overlap": {"a": entry(), "b": entry()},
    "three offsets": {"a": entry(data_offsets=[0, 4, 4])},
    "offsets reversed": {"a": entry(data_offsets=[4, 0])},
    "empty beside": {"a": entry(shape=[0], data_offsets=[0, 0]), "b": entry()},
    "empty between": {"a": entry(), "z": entry(shape=[0], data_offsets=[4, 4]), "b": entry(data_offsets=[4, 8])},
    "empty inside": {"a": entry(), "z": entry(shape=[0], data_offsets=[2, 2])},
    "empty and huge": {"a": entry(shape=[0, 2**63], data_offsets=[0, 0])},
    "empty and very huge": {"a": entry(shape=[2**32, 2**32, 0], data_offsets=[0, 0])},
    "empty, strides too long": {"a": entry(shape=[0, 2**62, 2], data_offsets=[0, 0])},
    "empty and long": {"a": entry(shape=[2**61, 0], data_offsets=[0, 0])},
    "misaligned": {"b": entry(dtype="U8", data_offsets=[0, 1]), "a": entry(data_offsets=[1, 5])},
    "unnamed": {"": entry()},
    "unknown dtype": {"a": entry(dtype="C128", data_offsets=[0, 16])},
    "dtype is no text": {"a": entry(dtype=7)},
    **{f"dtype {form}": {"a": entry(dtype=form, data_offsets=[0, n])} for form, n in [
        ("F64", 8), ("F16", 2), ("BF16", 2), ("C64", 8), ("I64", 8), ("I32", 4), ("I16", 2), ("I8", 1), ("U64", 8),
        ("U32", 4), ("U16", 2), ("U8", 1), ("BOOL", 1), ("F8_E4M3", 1), ("F8_E5M2", 1), ("F8_E8M0", 1),
        ("F8_E4M3FNUZ", 1), ("F8_E5M2FNUZ", 1),
    ]},
}  # fmt: skip


_NEED_TORCH = {"dtype F8_E8M0": "torch:2.7"}
"""Kinds of a dtype that the package asks of torch without looking."""


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=requires(_NEED_TORCH[k]) if k in _NEED_TORCH else ()) for k in _HEADERS]
)
def test_headers_are_judged_as_the_package_judges_them(kind: str, tmp_path: Path) -> None:
    """Whatever the package refuses is refused, and whatever a writer writes is read equal, for any amount of values."""
    verdicts = set()
    for size in (0, 1, 2, 3, 4, 5, 8, 16):
        write(tmp_path / "x.safetensors", _HEADERS[kind], b"\1" * size)
        wanted = reference(tmp_path / "x.safetensors")
        found = ours(tmp_path / "x.safetensors")
        assert same(found, wanted), (size, wanted)
        verdicts.add(wanted is None)
    assert True in verdicts


_numbers = st.integers(0, 4) | st.sampled_from([-1, 2**31, 2**62, 2**63, 2**64, 1.0, True, "1", None])
_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F6_E2M3", "XX"]) | st.none(),
        "shape": st.lists(_numbers, max_size=3) | st.none(),
        "data_offsets": st.lists(st.integers(0, 24) | _numbers, min_size=1, max_size=3),
    }
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), st.none() | _entries),
    st.integers(0, 24),
    st.lists(st.tuples(st.integers(0, 300), st.binary(min_size=1, max_size=2)), max_size=2),
)
def test_invented_headers_are_judged_as_the_package_judges_them(
    tmp_path_factory: pytest.TempPathFactory, header: Any, size: int, changes: list[tuple[int, bytes]]
) -> None:
    """Headers out of odd parts, and such with bytes replaced, are refused and read as the package does."""
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    raw = bytearray(json.dumps(header).encode())
    for place, new in changes:
        raw[place % len(raw) : place % len(raw) + 1] = new
    write(path, bytes(raw), b"\1" * size)
    assert same(ours(path), reference(path))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3)), max_size=6))
def test_whole_files_are_read_alike(tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, Any]]) -> None:
    """Files of every dtype and shape that are written here are read by the package, and the reverse."""
    tensors = {}
    for number, (form, shape) in enumerate(parts):
        whole = [*shape, DTYPES[form].itemsize]
        values = torch.randint(0, 2 if form == "BOOL" else 256, whole, dtype=torch.uint8)
        tensors[f"t{number}"] = values.view(DTYPES[form])
    path = tmp_path_factory.mktemp("whole") / "x.safetensors"
    write_tensors(path, tensors)
    wanted = reference(path)
    assert wanted is not None
    assert same(tensors, wanted)
    assert same(ours(path), wanted)


@pytest.mark.parametrize(("form", "nbytes"), [("F6_E2M3", 3), ("F6_E3M2", 3), ("F4", 2)])
def test_a_dtype_that_is_not_read_is_refused_where_it_is_needed(form: str, nbytes: int, tmp_path: Path) -> None:
    """The file opens, its other tensors are read, and reading that one names its dtype."""
    if form in DTYPES:
        pytest.skip("this torch has the dtype")
    odd = {"dtype": form, "shape": [4], "data_offsets": [4, 4 + nbytes]}
    write(tmp_path / "x", {"a": entry(), "odd": odd}, bytes(4 + nbytes))
    file = TensorFile(tmp_path, "x")
    assert file.read("a").tolist() == [0.0]
    with pytest.raises(CheckpointError, match=form):
        file.read("odd")


def test_tensors_are_read_on_the_cpu_under_any_default_device(tmp_path: Path) -> None:
    """A script may make its model on another device by default; bytes of a file reach memory of the CPU."""
    write_tensors(tmp_path / "x", {"across": torch.arange(6.0).view(2, 3)})
    destination = torch.zeros(3, 2).t()
    with torch.device("meta"):
        file = TensorFile(tmp_path, "x")
        found = file.read("across")
        file.read_into("across", destination)
    assert found.tolist() == destination.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_lazy_conj_and_neg_views_store_and_take_their_values(tmp_path: Path) -> None:
    """They have the memory of another tensor, and other values, so bytes of memory and file do not stand for them."""
    value = torch.tensor([1 + 2j, 3 - 4j])
    state = {"value": value, "conjugated": value.conj(), "imaginary": value.imag, "negated": value.conj().imag}
    write_tensors(tmp_path / "x", state)
    found = TensorFile(tmp_path, "x")
    assert found.tensors.keys() == state.keys()
    assert all(torch.equal(found.read(name), value.resolve_conj().resolve_neg()) for name, value in state.items())
    own = {"value": torch.zeros(2, dtype=torch.complex64).conj(), "imaginary": torch._neg_view(torch.zeros(2))}
    for name, destination in own.items():
        found.read_into(name, destination)
        assert torch.equal(destination, state[name])


def test_booleans_that_are_none_are_refused(tmp_path: Path) -> None:
    """A byte of 2, which torch would count as two, is refused, and the destination stays as it was."""
    write(tmp_path / "x", {"a": entry(dtype="BOOL", shape=[2], data_offsets=[0, 2])}, b"\1\2")
    destination = torch.tensor([False, False])
    for read in (lambda file: file.read("a"), lambda file: file.read_into("a", destination)):
        with pytest.raises(CheckpointDamagedError, match="neither 0 nor 1"):
            read(TensorFile(tmp_path, "x"))
    assert destination.tolist() == [False, False]


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("__metadata__", torch.ones(1), "'__metadata__' is a Tensor"),
        ("x", torch.eye(2).to_sparse(), r"'x' is a Tensor of torch.float32 and torch.sparse_coo"),
    ],
)
def test_values_outside_the_format_are_refused(name: str, tensor: torch.Tensor, said: str, tmp_path: Path) -> None:
    """A tensor named like the format's own entry, and a sparse one, whose indices would be missing, are named."""
    with pytest.raises(CheckpointError, match=said):
        write_tensors(tmp_path / "x", {name: tensor})


_OPEN = """
import resource, sys
from pathlib import Path
from accel_core.checkpoint.tensor_file import TensorFile
from accel_core.errors import CheckpointDamagedError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    try:
        TensorFile(path.parent, path.name)
    except CheckpointDamagedError as error:
        assert path.name in str(error)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_hostile_headers_take_memory_in_proportion(tmp_path: Path) -> None:
    """Headers made to grow, or that announce more than the file has, are refused within 24 times their size."""
    size = 4 << 20
    inners = {"lists": "[]," * (size // 3), "numbers": "7000," * (size // 5), "announced": "", "deep": "[" * size}
    for kind, inner in inners.items():
        raw = (_EXTRA % f"[{inner}0]").encode()
        write(tmp_path / f"{kind}.safetensors", raw, bytes(5), length=2**63 if kind == "announced" else None)
    done = subprocess.run(
        [sys.executable, "-c", _OPEN, str(tmp_path)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-1000:]
    grown = [int(line) for line in done.stdout.split()]
    assert len(grown) == len(inners)
    assert max(grown) < 24 * size // 1024


def test_a_stream_takes_the_bytes_of_a_file(tmp_path: Path) -> None:
    """What is written to a stream is what a file would hold."""
    with open(tmp_path / "s", "wb") as file:
        stream_tensors(file, {"x": torch.ones(3)})
    write_tensors(tmp_path / "f", {"x": torch.ones(3)})
    assert (tmp_path / "s").read_bytes() == (tmp_path / "f").read_bytes()
