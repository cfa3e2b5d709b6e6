"""GGUF files as checkpoints: values, names, places, and files that nobody should trust."""

import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from accel_bigmodel import (
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel_bigmodel.checkpoint.read import load_state_dict, open_checkpoint
from accel_bigmodel.checkpoint.skeleton import skeleton_of
from accel_bigmodel.gguf import packed
from accel_bigmodel.gguf.blocks import KINDS, unpack
from accel_bigmodel.gguf.packed import GgufWeight
from accel_bigmodel.sizes import compute_module_sizes
from accel_core.accelerator import Accelerator
from accel_core.checkpoint.weights import save_model
from accel_core.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    MissingDependencyError,
    QuantizationError,
)
from accel_core.host.versions import is_torch_version

gguf = pytest.importorskip("gguf", reason="the extra `gguf` of accel-bigmodel is not installed")

PACKED = ["Q8_0", "Q4_0", "Q4_K", "Q6_K"]
WIDTH = 256


class Net(nn.Module):
    """An embedding and two layers, of which the second has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return four scores for each number."""
        return self.last(self.first(self.table(numbers)).relu())


NUMBERS = torch.tensor([[1, 7, 0], [3, 3, 5]])


def random_rows(kind: str, rows: int, columns: int) -> np.ndarray:
    """Return packed rows of any bytes, with scales that are finite and small."""
    values, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(len(kind) + rows)
    blocks = generator.integers(0, 256, (rows * columns // values, nbytes), dtype=np.uint8)
    for place in {"Q4_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,)):
        blocks[:, place : place + 2] = (
            generator.normal(scale=0.01, size=(len(blocks), 1)).astype(np.float16).view(np.uint8)
        )
    return blocks.reshape(rows, -1)


def write(path: Path, tensors: dict[str, Any], architecture: str = "own", **settings: Any) -> None:
    """Write a file: arrays, or pairs of packed rows and the name of their type; `split` is a part's number."""
    writer = gguf.GGUFWriter(path, architecture)
    if "split" in settings:
        writer.add_uint16("split.no", settings.pop("split"))
        writer.add_uint16("split.count", 3)
    for key, value in settings.items():
        writer.add_uint32(f"{architecture}.{key}".replace("__", "."), value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=gguf.GGMLQuantizationType[value[1]])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_net(path: Path, kind: str) -> nn.Module:
    """Write a Net whose matrices are of a packed type; return it with gguf's own values."""
    torch.manual_seed(0)
    net, tensors = Net(), {}
    for name, value in net.state_dict().items():
        array = value.numpy()
        if array.ndim == 2:
            rows = random_rows(kind, *array.shape)
            tensors[name] = rows, kind
            value.copy_(torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])))
        else:
            tensors[name] = array
    write(path, tensors)
    return net


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_have_the_values_of_the_gguf_package(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """In memory, on disk and unpacked while loading: parameters and outputs are those of gguf's own values, cast."""
    net = write_net(tmp_path / "x.gguf", kind).to(dtype)
    want = net(NUMBERS)
    for where in ("cpu", "disk"):
        for dequantize in (False, True):
            with init_empty_weights():
                model: Any = Net().to(dtype)
            model = load_checkpoint_and_dispatch(
                model, tmp_path, {"": where}, dequantize=dequantize, strict=True,
                offload_folder=tmp_path / f"{where}{dequantize}",
            )  # fmt: skip
            assert isinstance(model.first.weight, GgufWeight) is not dequantize
            assert torch.equal(model(NUMBERS), want)
            assert torch.equal(model(NUMBERS), want)
            if where == "cpu":
                for name, value in model.state_dict().items():
                    assert torch.equal(value + 0, net.state_dict()[name])
    assert not (tmp_path / "diskFalse" / "index.json").exists()  # read in place, and nothing is written


@pytest.mark.parametrize("number", [-1, 1 << 20])
@pytest.mark.parametrize("dequantize", [False, True])
def test_a_number_that_is_no_row_is_refused(number: int, dequantize: bool, tmp_path: Path) -> None:
    """A packed embedding looks up no other row for one below zero, as a plain one does not."""
    write_net(tmp_path / "x.gguf", "Q8_0")
    with init_empty_weights():
        model: Any = Net()
    load_checkpoint_in_model(model, tmp_path, dequantize=dequantize)
    with pytest.raises(IndexError):
        model.table(torch.tensor([number]))


def test_plain_weights_are_views_of_the_file(tmp_path: Path) -> None:
    """Float32, float16 and bfloat16 in the model's dtype take no memory of their own, and others are cast."""
    values = torch.randn(3, 4, 32)
    tensors = {
        "in_float32": values.numpy(), "in_float16": values.half().numpy(),
        "in_bfloat16": (values.bfloat16().view(torch.uint8).numpy(), "BF16"),
    }  # fmt: skip
    write(tmp_path / "x.gguf", tensors)
    for name in tensors:
        model = nn.Module()
        dtype = getattr(torch, name.removeprefix("in_"))
        model.register_parameter(name, nn.Parameter(torch.empty(3, 4, 32, dtype=dtype, device="meta")))
        load_checkpoint_in_model(model, tmp_path / "x.gguf")
        made = getattr(model, name)
        assert torch.equal(made, values.to(made.dtype))
        assert made.requires_grad
        held = open_checkpoint(tmp_path / "x.gguf").shard_of(name)
        assert held.tensor(name).data_ptr() == held.tensor(name).data_ptr()
        tracemalloc.start()
        load_state_dict(tmp_path / "x.gguf")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
    single = nn.Module()
    single.register_parameter("in_float16", nn.Parameter(torch.empty(3, 4, 32)))
    load_checkpoint_in_model(single, tmp_path / "x.gguf")
    assert torch.equal(single.in_float16, values.half().float())


def test_a_map_counts_packed_bytes_and_so_do_headers(tmp_path: Path) -> None:
    """Limits that hold the packed model, but not its values, place it on the CPU; headers alone count the same."""
    write_net(tmp_path / "x.gguf", "Q4_0")
    with init_empty_weights():
        model: Any = Net()
    whole = compute_module_sizes(model)[""]
    model = load_checkpoint_and_dispatch(model, tmp_path / "x.gguf", "auto", max_memory={"cpu": whole // 4, "disk": 0})
    assert set(model.hf_device_map.values()) == {"cpu"}
    packed = compute_module_sizes(model)[""]
    assert packed < whole // 4
    assert compute_module_sizes(skeleton_of(str(tmp_path / "x.gguf")))[""] == packed
    assert compute_module_sizes(skeleton_of(str(tmp_path)))[""] == packed


def test_packed_weights_are_frozen_and_gradients_pass_through(tmp_path: Path) -> None:
    """Inputs get the gradient of the values; a write is refused; loads of the same values, copies and casts are not."""
    net: Any = write_net(tmp_path / "x.gguf", "Q4_K")
    model: Any = Net()
    load_checkpoint_in_model(model, tmp_path / "x.gguf")
    weight = model.first.weight
    assert not weight.requires_grad
    inputs = [torch.randn(2, WIDTH, requires_grad=True) for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    for each, layer in zip(inputs, (model.first, net.first), strict=True):
        layer(each).square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    with pytest.raises(QuantizationError, match="dequantize=True"):
        weight.data.mul_(2)
    for state in (net.state_dict(), model.state_dict()):
        model.load_state_dict(state)
    assert torch.equal(model(NUMBERS), net(NUMBERS))
    assert torch.equal(model.half()(NUMBERS), net.half()(NUMBERS))
    assert isinstance(model.first.weight, GgufWeight)


def test_packed_weights_move_for_a_forward_and_save_as_values(tmp_path: Path) -> None:
    """A loaded model is dispatched to the disk by its packed bytes, and saved as the values."""
    net = write_net(tmp_path / "x.gguf", "Q8_0")
    model: Any = Net()
    load_checkpoint_in_model(model, tmp_path / "x.gguf")
    save_model(model, None, tmp_path / "saved")
    load_checkpoint_in_model(again := Net(), tmp_path / "saved", strict=True)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in net.state_dict().items())
    model = dispatch_model(model, {"table": "cpu", "first": "disk", "last": "cpu"}, offload_dir=tmp_path / "away")
    assert (tmp_path / "away" / "first.weight.dat").stat().st_size == WIDTH * WIDTH // 32 * 34
    assert torch.equal(model(NUMBERS), net(NUMBERS))


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model.share_memory(),
        lambda model: model.first.weight.share_memory_(),
        lambda model: model.first.weight.apply_(abs),
        lambda model: model.first.weight.map_(model.first.weight, max),
        lambda model: torch.from_dlpack(model.first.weight.detach()),
        lambda model: model.first.weight.copy_(torch.zeros(WIDTH, WIDTH)),
        lambda model: model.load_state_dict({"first.weight": torch.zeros(WIDTH, WIDTH)}, strict=False),
    ],
    ids=["model", "weight", "apply", "map", "dlpack", "copy", "state dict"],
)
def test_uses_of_missing_memory_are_refused(use: Callable[[Any], object], tmp_path: Path) -> None:
    """What would read or write memory of values is an error that says the way out, and changes nothing."""
    net = write_net(tmp_path / "x.gguf", "Q8_0")
    model: Any = Net()
    load_checkpoint_in_model(model, tmp_path / "x.gguf")
    with torch.no_grad(), pytest.raises((QuantizationError, RuntimeError), match=r"packed weight.*dequantize=True"):
        use(model)
    assert torch.equal(model(NUMBERS), net(NUMBERS))


class Adapted(nn.Module):
    """A packed layer with an adapter, as peft builds them."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the adapter's output to the layer's."""
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("given", ["all", "adapter"])
def test_an_adapter_on_packed_weights_trains_and_resumes(given: str, tmp_path: Path, fresh_state: None) -> None:
    """A run prepares, trains, saves, casts and loads an adapter on packed weights, which stay as they are."""
    net = write_net(tmp_path / "x.gguf", "Q8_0")
    base: Any = Net()
    load_checkpoint_in_model(base, tmp_path / "x.gguf")
    base.requires_grad_(False)
    base.first = Adapted(base.first)
    trained = [each for each in base.parameters() if given == "all" or each.requires_grad]
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(base, torch.optim.SGD(trained, lr=0.1))
    for saves in (True, False):
        accelerator.backward(model(NUMBERS).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        if saves:
            accelerator.save_state(tmp_path / "state")
            expected = model(NUMBERS).detach()
    assert not torch.equal(model(NUMBERS), expected)
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model(NUMBERS), expected)
    model.to(torch.float32)
    assert isinstance(model.first.base.weight, GgufWeight)
    assert torch.equal(model.first.base.weight + 0, net.first.weight)


class Experts(nn.Module):
    """Four experts in one stack."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.stack = nn.Parameter(torch.randn(4, 64, 64))

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of what the chosen experts make of tokens."""
        made = torch.zeros_like(tokens)
        for number in numbers.unique().tolist():
            row, choice = (numbers == number).nonzero(as_tuple=True)
            made.index_add_(0, row, tokens[row] @ self.stack[number].t() * weights[row, choice].unsqueeze(1))
        return made


@pytest.mark.parametrize("place", ["disk", "cpu"])
@pytest.mark.parametrize(("kind", "dequantize"), [("F32", False), ("Q8_0", True), ("Q8_0", False)])
@pytest.mark.skipif(is_torch_version("<", "2.9"), reason="docs/installation.md: not with torch 2.8")
def test_experts_come_one_by_one_from_stacks(
    kind: str, dequantize: bool, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place from a plain or packed stack, packed all the way; from the folder if it was unpacked."""
    torch.manual_seed(0)
    net = nn.Sequential(Experts(), nn.Linear(64, 64))
    array = net[0].stack.detach().numpy()
    if kind == "Q8_0":
        rows = gguf.quantize(array, gguf.GGMLQuantizationType.Q8_0)
        net[0].stack.data.copy_(torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType.Q8_0)))
    rest = {name: each.numpy() for name, each in net[1].state_dict(prefix="1.").items()}
    write(tmp_path / "x.gguf", {"0.stack": (rows, kind) if kind == "Q8_0" else array, **rest})
    tokens, numbers, weights = torch.randn(3, 64), torch.tensor([[1], [3], [1]]), torch.rand(3, 1)
    one = 64 * 64 * 4 if kind == "F32" or dequantize else 64 * 64 // 32 * 34
    model: Any = nn.Sequential(Experts(), nn.Linear(64, 64))
    if place == "disk":
        options: dict[str, Any] = {"expert_cache": "32KiB", "offload_folder": tmp_path / "away"}
        places = {"0": "disk", "1": "cpu"}
        load_checkpoint_and_dispatch(model, tmp_path / "x.gguf", places, dequantize=dequantize, **options)
    else:
        load_checkpoint_in_model(model, tmp_path / "x.gguf", dequantize=dequantize)
        dispatch_model(model, {"0": "cpu", "1": "meta"}, main_device="meta", expert_cache="32KiB")
        model[0].__dict__["_hf_hook"].execution_device = "cpu"  # the meta device cannot tell who was chosen
    unpacked: list[int] = []
    monkeypatch.setattr(packed, "unpack", lambda raw, *rest: unpacked.append(raw.nbytes) or unpack(raw, *rest))
    assert torch.equal(model[0](tokens, numbers, weights), net[0](tokens, numbers, weights))
    report = model.expert_report()
    assert (report.misses, report.held) == (2, 2 * one)
    assert (report.from_disk, report.from_host) == ((2 * one, 0) if place == "disk" else (0, 2 * one))
    assert (tmp_path / "away" / "0.stack.dat").exists() == (dequantize and place == "disk")
    assert set(unpacked) == (set() if kind == "F32" or dequantize else {one})


def test_one_expert_of_a_packed_stack_is_unpacked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory too, by any number; other dims, and stacks in another order, give their values."""
    array = np.random.default_rng(0).normal(size=(4, 8, 64)).astype(np.float32)
    rows = torch.from_numpy(gguf.quantize(array, gguf.GGMLQuantizationType.Q8_0))
    weight, turned = (GgufWeight(rows, "Q8_0", (4, 8, 64), torch.float32, order) for order in (None, torch.arange(4)))
    whole = weight.values()
    assert torch.equal(weight[:, 2], whole[:, 2])
    assert torch.equal(turned[1], whole[1])
    unpacked: list[int] = []
    monkeypatch.setattr(packed, "unpack", lambda raw, *rest: unpacked.append(raw.nbytes) or unpack(raw, *rest))
    tokens = torch.randn(3, 64)
    for number in (1, -1, torch.tensor(2)):
        assert isinstance(weight[number], GgufWeight)
        assert torch.equal(nn.functional.linear(tokens, weight[number]), tokens @ whole[number].t())
    assert unpacked == [rows[0].nbytes] * 3


def test_unpackable_types_are_named_and_can_be_unpacked(tmp_path: Path) -> None:
    """Q5_0 is refused with the way out, the model stays as it was, and the way out gives gguf's values."""
    array = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q5_0
    rows = gguf.quantize(array, kind)
    write(tmp_path / "x.gguf", {"weight": (rows, "Q5_0"), "bias": array[0, :4]})
    model = nn.Linear(64, 4)
    before = dict(model.named_parameters())
    with pytest.raises(CheckpointError, match=r"got Q5_0 for 'weight' in .*x\.gguf.*dequantize=True.*Q4_K"):
        load_checkpoint_in_model(model, tmp_path / "x.gguf")
    assert all(model.get_parameter(name) is value for name, value in before.items())
    load_checkpoint_in_model(model, tmp_path / "x.gguf", dequantize=True)
    assert torch.equal(model.weight, torch.from_numpy(gguf.dequantize(rows, kind)))


def test_a_file_of_another_model_changes_nothing(tmp_path: Path) -> None:
    """Shapes that differ are named, and no parameter was replaced by a packed one."""
    write_net(tmp_path / "x.gguf", "Q8_0")
    model = Net()
    model.last = nn.Linear(WIDTH, 5)
    before = dict(model.named_parameters())
    with pytest.raises(CheckpointMismatchError, match=r"last\.weight: \(4, 256\)"):
        load_checkpoint_in_model(model, tmp_path / "x.gguf")
    assert all(model.get_parameter(name) is value for name, value in before.items())


def test_without_the_library_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    write_net(tmp_path / "x.gguf", "Q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependencyError, match=r"pip install gguf"):
        load_checkpoint_in_model(Net(), tmp_path / "x.gguf")


def test_a_split_file_is_one_checkpoint_and_misses_are_named(tmp_path: Path) -> None:
    """Any part and the folder name all of them; without one, or one alone, loading is refused."""
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(32, 2), nn.Linear(2, 32), nn.Linear(32, 1))
    paths = [tmp_path / f"x-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for number, path in enumerate(paths):
        state = source[number].state_dict(prefix=f"{number}.")
        write(path, {name: value.numpy() for name, value in state.items()}, split=number)
    for place in (tmp_path, *paths):
        model = nn.Sequential(nn.Linear(32, 2), nn.Linear(2, 32), nn.Linear(32, 1))
        load_checkpoint_in_model(model, place, strict=True)
        assert all(torch.equal(model.state_dict()[name], value) for name, value in source.state_dict().items())
    paths[1].rename(tmp_path / "alone.gguf")
    for place, words in ((paths[0], r"x-00002-of-00003\.gguf"), (tmp_path / "alone.gguf", "one of 3")):
        with pytest.raises(CheckpointNotFoundError, match=words):
            load_checkpoint_in_model(model, place)
    with pytest.raises(CheckpointMismatchError, match=r"several weights files"):
        load_checkpoint_in_model(model, tmp_path)


def text(value: str) -> bytes:
    """Return a string of the format."""
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str = "a", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    """Return the description of a tensor."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file(
    *tensors: bytes, pairs: tuple[bytes, ...] = (), version: int = 3, counts: tuple[int, int] | None = None,
    data: int = 256, magic: bytes = b"GGUF",
) -> bytes:  # fmt: skip
    """Return a whole file, with counts and the rest as they should be by default."""
    head = magic + struct.pack("<IQQ", version, *(counts or (len(tensors), len(pairs)))) + b"".join((*pairs, *tensors))
    return head + bytes(-len(head) % 32 + data)


def pair(key: str, kind: int, value: bytes) -> bytes:
    """Return a pair of metadata."""
    return text(key) + struct.pack("<I", kind) + value


HUGE = struct.pack("<Q", 1 << 60)
NESTED = struct.pack("<IQ", 9, 1) * 5000
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "do not begin like"),
    "short": (b"GGUF\3\0\0\0", "do not begin like"),
    "magic": (file(tensor(), magic=b"GGML"), "do not begin like"),
    "version 1": (file(tensor(), version=1), "version 1"),
    "version of tomorrow": (file(tensor(), version=77), "version 77"),
    "other order of bytes": (file(tensor(), version=3 << 24), "other order of bytes"),
    "tensors without end": (file(tensor(), counts=(1 << 60, 0)), "empty or for the second time"),
    "pairs without end": (file(tensor(), counts=(1, 1 << 60)), "has not|empty or"),
    "name of 2^60 bytes": (file(HUGE + b"a"), "a name of 1152921504606846976 bytes"),
    "key of 2^60 bytes": (file(tensor(), pairs=(HUGE + b"a",)), "a name of 1152921504606846976 bytes"),
    "string of 2^60 bytes": (file(tensor(), pairs=(pair("a", 8, HUGE),)), "1152921504606846976 bytes where"),
    "array of 2^60 numbers": (file(tensor(), pairs=(pair("a", 9, struct.pack("<I", 6) + HUGE),)), "bytes where"),
    "array of 2^60 strings": (file(tensor(), pairs=(pair("a", 9, struct.pack("<I", 8) + HUGE),)), "an array of"),
    "array of long strings": (
        file(tensor(), pairs=(pair("a", 9, struct.pack("<IQ", 8, 2) + HUGE + HUGE),)),
        "bytes where",
    ),
    "array of arrays of arrays": (file(tensor(), pairs=(pair("a", 9, NESTED),)), "nested too deeply|bytes where|array"),
    "type of a value": (file(tensor(), pairs=(pair("a", 99, b""),)), "a value of type 99"),
    "type in an array": (file(tensor(), pairs=(pair("a", 9, struct.pack("<IQ", 42, 1)),)), "a value of type 42"),
    "key twice": (file(tensor(), pairs=(pair("a", 0, b"\1"),) * 2), "the key 'a'"),
    "tensor twice": (file(tensor(), tensor(offset=128)), "the name 'a'"),
    "name that is no text": (file(tensor().replace(b"a", b"\xff")), "utf-8"),
    "alignment 0": (file(tensor(), pairs=(pair("general.alignment", 4, bytes(4)),)), "an alignment of 0"),
    "alignment 3": (file(tensor(), pairs=(pair("general.alignment", 4, b"\3\0\0\0"),)), "an alignment of 3"),
    "alignment as text": (file(tensor(), pairs=(pair("general.alignment", 8, text("32")),)), "an alignment of '32'"),
    "alignment of 2^31": (
        file(tensor(), pairs=(pair("general.alignment", 4, b"\0\0\0\x80"),)),
        "up to byte 2147483776",
    ),
    "five axes": (file(tensor(shape=(2, 2, 2, 2, 2))), "with 5 axes"),
    "2^32 - 1 axes": (file(text("a") + b"\xff\xff\xff\xff"), "with 4294967295 axes"),
    "sizes whose product overflows": (file(tensor(shape=(1 << 32, 1 << 32))), "up to byte"),
    "sizes whose product is 1 modulo 2^64": (file(tensor(shape=((1 << 64) - 1, (1 << 64) - 1))), "up to byte"),
    "no elements and a size of 2^62": (file(tensor(shape=(0, 1 << 62))), "torch cannot hold"),
    "row that is no whole block": (file(tensor(shape=(33,), kind=8)), "rows of 33"),
    "offset beyond the end": (file(tensor(offset=1 << 40)), "up to byte"),
    "offset of 2^64 - 32": (file(tensor(offset=(1 << 64) - 32)), "up to byte"),
    "offset askew": (file(tensor(offset=8)), "askew"),
    "overlap": (file(tensor("a"), tensor("b", offset=96)), "overlap"),
    "values that are missing": (file(tensor(), data=64), "up to byte"),
    "tensors that are missing": (file(tensor(), counts=(3, 0), data=0), "bytes where|second time"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_headers_that_lie_are_refused(kind: str, tmp_path: Path) -> None:
    """Weights, plans and models refuse the file by its name, and little memory is taken for it."""
    content, words = HOSTILE[kind]
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    model = nn.Module()
    model.register_parameter("a", nn.Parameter(torch.ones(32)))
    readers: list[Callable[[Path], object]] = [
        load_state_dict, skeleton_of, open_checkpoint, lambda place: load_checkpoint_in_model(model, place),
    ]  # fmt: skip
    tracemalloc.start()
    for read in readers:
        with pytest.raises(CheckpointDamagedError, match=rf"(?s)x\.gguf.*({words})"):
            read(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()
    assert torch.equal(model.a, torch.ones(32))


def test_a_whole_file_in_the_same_form_is_read(tmp_path: Path) -> None:
    """What the lying headers are made of is right otherwise; versions 2 and 3 are the same here."""
    for version in (2, 3):
        (tmp_path / "x.gguf").write_bytes(
            file(
                tensor(), tensor("b", (32, 2), offset=128), pairs=(pair("k", 8, text("v")),), version=version, data=384
            )
        )
        found = load_state_dict(tmp_path / "x.gguf")
        assert {name: tuple(value.shape) for name, value in found.items()} == {"a": (32,), "b": (2, 32)}


@pytest.mark.parametrize("number", [35, 200])
def test_a_type_that_the_library_does_not_know_is_named(number: int, tmp_path: Path) -> None:
    """Its number is named, and that a newer library may know it."""
    (tmp_path / "x.gguf").write_bytes(file(tensor(kind=number + 1000)))
    with pytest.raises(CheckpointError, match=rf"got {number + 1000} for 'a' in .*Install a newer gguf"):
        open_checkpoint(tmp_path / "x.gguf")


def test_headers_cut_or_changed_anywhere_are_refused_or_read(tmp_path: Path) -> None:
    """Wherever a file is cut inside its header, it is refused; a changed byte never does anything else than that."""
    write_net(tmp_path / "whole.gguf", "Q8_0")
    whole, path = (tmp_path / "whole.gguf").read_bytes(), tmp_path / "x.gguf"
    end = gguf.GGUFReader(tmp_path / "whole.gguf").data_offset
    for length in range(0, end, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointDamagedError):
            open_checkpoint(path)
    generator = np.random.default_rng(0)
    refused = 0
    for place in generator.integers(0, end, 150):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ int(generator.integers(1, 256))]) + whole[place + 1 :])
        try:
            load_state_dict(path)
        except CheckpointError as error:
            refused += "x.gguf" in str(error)
        else:
            refused += 1
    assert refused == 150


def test_the_header_says_what_the_reader_of_the_library_says(tmp_path: Path) -> None:
    """Names, types, shapes and places are those that gguf's own reader finds."""
    tensors = {kind: (random_rows(kind, 3, 256), kind) for kind in (*PACKED, "Q5_0", "Q2_K", "IQ4_XS")}
    write(
        tmp_path / "x.gguf",
        {**tensors, "F16": np.ones((2, 3, 5), np.float16), "I8": np.ones(3, np.int8)},
        block_count=2,
    )
    shard: Any = open_checkpoint(tmp_path / "x.gguf").shards[0]
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert [each.name for each in reader.tensors] == list(shard.entries)
    for each in reader.tensors:
        entry = shard._files[each.name].entries[each.name]
        assert shard._forms[each.name] == (each.tensor_type.name, tuple(each.shape.tolist()[::-1]))
        assert (entry.start, entry.nbytes) == (each.data_offset, each.n_bytes)
    assert set(PACKED) < set(KINDS)


def _permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of rotary heads in the order in which llama.cpp wants them."""
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen3moe": ("Qwen3Moe", {"tie_word_embeddings": False, **EXPERTS}),
    "gemma2": ("Gemma2", {"head_dim": 16, "tie_word_embeddings": True}),
}


def _converted(source: nn.Module, family: str, kind: str) -> dict[str, Any]:
    """Return the tensors of a model as llama.cpp writes them."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], 2)
    tensors: dict[str, Any] = {}
    for name, value in source.state_dict().items():
        arrays = {names.get_name(name, try_suffixes=(".weight",)) or name: value.numpy()}
        (stored, array), *_ = arrays.items()
        if name == "lm_head.weight" and source.config.tie_word_embeddings:
            continue
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            arrays[stored] = _permuted(array, 4 if "q_proj" in name else 2)
        elif family == "gemma2" and "norm" in name:
            arrays[stored] = array + 1
        elif "experts." in name:
            begin, middle = f"blk.{name.split('.')[2]}.ffn_", array.shape[1] // 2
            arrays = {f"{begin}down_exps.weight": array}
            if "gate_up" in name:
                arrays = {f"{begin}gate_exps.weight": array[:, :middle], f"{begin}up_exps.weight": array[:, middle:]}
        for key, each in arrays.items():
            if each.ndim > 1 and kind == "Q8_0":
                tensors[key] = gguf.quantize(np.ascontiguousarray(each), gguf.GGMLQuantizationType.Q8_0), kind
            else:
                tensors[key] = np.ascontiguousarray(each.astype(np.float16) if each.ndim > 1 else each)
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_those_that_transformers_loads(kind: str, family: str, tmp_path: Path) -> None:
    """Names, rotary rows, joined experts and shifted norms are mapped back, in memory and on disk."""
    transformers = pytest.importorskip("transformers")
    architecture = family.partition(",")[0]
    title, own = FAMILIES[family]
    config = getattr(transformers, f"{title}Config")(**SIZES, **own)
    build = getattr(transformers, f"{title}ForCausalLM")
    torch.manual_seed(0)
    settings = {
        "block_count": 2, "context_length": 32, "embedding_length": 64, "feed_forward_length": 96, "vocab_size": 64,
        "attention__head_count": 4, "attention__head_count_kv": 2,
    }  # fmt: skip
    write(tmp_path / "x.gguf", _converted(build(config), architecture, kind), architecture, **settings)
    theirs = build.from_pretrained(tmp_path, gguf_file="x.gguf", config=config, dtype=torch.float32).eval()
    numbers = torch.randint(0, 64, (2, 5))
    with torch.no_grad():
        want = theirs(numbers).logits
        for number, place in enumerate(({"": "cpu"}, {"": "disk"}, {"model": "disk", "lm_head": "cpu"})):
            with init_empty_weights():
                model: Any = build(config).eval()
            model.tie_weights()
            model = load_checkpoint_and_dispatch(
                model, tmp_path / "x.gguf", place, strict=True, offload_folder=tmp_path / str(number)
            )
            assert torch.equal(model(numbers).logits, want)
            assert any(isinstance(each, GgufWeight) for each in model.parameters()) == (
                kind == "Q8_0" or (number > 0 and architecture == "llama")
            )
            if number == 0:
                config.architectures = [f"{title}ForCausalLM"]
                config.save_pretrained(tmp_path)
                planned = compute_module_sizes(skeleton_of(str(tmp_path)), "float32")
                assert planned[""] == compute_module_sizes(model)[""]
        if architecture == "qwen3moe":
            with init_empty_weights():
                model = build(config).eval()
            place = {name: "cpu" for name, _ in model.named_parameters()}
            place = {name.rpartition(".")[0] if "experts" in name else name: "cpu" for name in place}
            place = {name: "disk" if name.endswith("experts") else device for name, device in place.items()}
            options: dict[str, Any] = {"offload_folder": tmp_path / "experts", "expert_cache": "1MiB"}
            model = load_checkpoint_and_dispatch(model, tmp_path / "x.gguf", place, strict=True, **options)
            assert torch.allclose(model(numbers).logits, want, atol=1e-6)
            report = model.expert_report()
            assert report.misses > 0
            if kind == "Q8_0":  # 32 weights of 8 bits and their scale
                assert report.from_disk == report.misses * 3 * 32 * 64 // 32 * 34
    config.num_attention_heads = 8
    with pytest.raises(CheckpointMismatchError, match="head_count 4 in it and num_attention_heads 8"):
        load_checkpoint_in_model(build(config), tmp_path / "x.gguf")
