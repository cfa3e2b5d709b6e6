"""Checkpoints that come straight to a GPU: values, dtypes, and the most memory that it takes."""

import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch
from accel_core.checkpoint.weights import save_model
from accel_testing import limits
from accel_testing.requires import requires

DEVICE = torch.device("cuda", 0)
WIDTH, LAYERS = 1024, 6
LAYER = 4 * WIDTH * (WIDTH + 1)
"""Bytes of one layer in float32."""


def stack(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Make layers, the same each time."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS)]
    return nn.Sequential(*layers).eval().requires_grad_(False)


def empty(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Make the layers without weights."""
    with init_empty_weights():
        return stack(dtype)


def _sharded(folder: Path) -> Path:
    save_model(stack(), None, folder, max_shard_size=2 * LAYER)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def _pickled(folder: Path) -> Path:
    torch.save(stack().state_dict(), folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("write", [_sharded, _pickled])
@torch.no_grad()
def test_weights_go_straight_to_the_device(
    write: Callable[[Path], Path], dtype: torch.dtype | None, tmp_path: Path
) -> None:
    """The device never holds more than the weights and one tensor, whatever they are stored in and cast to."""
    checkpoint, plain = write(tmp_path), stack().to(DEVICE, dtype)
    x = torch.randn(4, WIDTH, device=DEVICE, dtype=dtype)
    expected = plain(x)
    before = torch.cuda.memory_allocated(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    model = load_checkpoint_and_dispatch(empty(), checkpoint, {"": 0}, dtype=dtype)
    peak = torch.cuda.max_memory_allocated(DEVICE) - before
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert {(p.device, p.dtype) for p in model.parameters()} == {(DEVICE, dtype or torch.float32)}
    assert weights <= peak <= weights + max(parameter.nbytes for parameter in model.parameters())
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential"])
@torch.no_grad()
def test_a_chosen_map_keeps_its_limit(strategy: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    """Weights on the GPU, the CPU and the disk: passes are exact, within the device's limit and what a pass takes."""
    checkpoint, size = _sharded(tmp_path), LAYER // (1 if dtype is None else 2)
    x = torch.randn(4, WIDTH, device=DEVICE, dtype=dtype)
    plain = stack().to(DEVICE, dtype)
    plain(x)
    held = torch.cuda.memory_allocated(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    expected = plain(x)
    extra = torch.cuda.max_memory_allocated(DEVICE) - held
    room: dict[int | str, int | str] = {0: 4 * size + 4096, "cpu": 2 * size + 4096, "disk": 10 * size}
    before = torch.cuda.memory_allocated(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    model = load_checkpoint_and_dispatch(empty(), checkpoint, strategy, room, dtype=dtype)
    assert set(model.hf_device_map.values()) == {0, "cpu", "disk"}
    outputs = [model(x) for _ in range(3)]
    assert all(torch.equal(output, expected) for output in outputs)
    peak = torch.cuda.max_memory_allocated(DEVICE) - before
    assert peak <= 4 * size + extra + size // 2


@pytest.mark.parametrize("place", [0, "cpu", "disk"])
@torch.no_grad()
def test_packed_weights_are_unpacked_by_the_device(place: int | str, tmp_path: Path) -> None:
    """A layer of a GGUF file gives the same as the values that gguf itself unpacks, wherever its bytes wait."""
    gguf = pytest.importorskip("gguf")
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 4)).requires_grad_(False)
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "own")
    kind = gguf.GGMLQuantizationType.Q8_0
    rows = gguf.quantize(model[0].weight.numpy(), kind)
    model[0].weight.copy_(torch.from_numpy(gguf.dequantize(rows, kind)))
    writer.add_tensor("0.weight", rows, raw_dtype=kind)
    for name in ("1.weight", "1.bias"):
        writer.add_tensor(name, model.state_dict()[name].numpy())
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    with init_empty_weights():
        loaded = copy.deepcopy(nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 4)))
    loaded = load_checkpoint_and_dispatch(loaded, file, {"0": place, "1": 0})
    x = torch.randn(8, 256, device=DEVICE)
    for _ in range(2):
        assert torch.equal(loaded(x), model.to(DEVICE)(x))


@requires("sklearn")
def test_the_example_runs_beside_a_gpu(tmp_path: Path) -> None:
    """A model that its map keeps on the CPU and the disk predicts what it does in memory, on a machine with a GPU."""
    root = next(folder for folder in Path(__file__).parents if (folder / "examples").is_dir())
    code = "import sys, torch; from digits import DigitNet; from safetensors.torch import save_file; import os\n"
    code += "os.makedirs(sys.argv[1]); save_file(DigitNet().state_dict(), sys.argv[1] + '/model.safetensors')"
    paths = os.pathsep.join([str(root / "examples"), *(each for each in sys.path if each)])
    environment = {**os.environ, "PYTHONPATH": paths}
    example = [str(root / "examples/run_big_model.py"), "--folder", str(tmp_path)]
    for words in (["-c", code, str(tmp_path / "model")], example):
        done = limits.run([sys.executable, *words], quiet=20, env=environment, cwd=tmp_path, check=True)
    assert "True, bit for bit" in done.stdout
