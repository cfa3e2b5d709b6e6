"""Models spread over the CPU and the disk compute what they compute in memory."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accel_bigmodel import infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch
from accel_core.errors import CheckpointDamagedError, CheckpointMismatchError, CheckpointNotFoundError


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the block's output to its input."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """A stack of blocks with an embedding tied to its head."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Score every token."""
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Model, Path]:
    """A model and its checkpoint of two safetensors shards with an index."""
    torch.manual_seed(0)
    model = Model().eval()
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    names = list(state)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        file = f"model-{number}.safetensors"
        save_file({name: state[name].contiguous() for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return model, folder


TOKENS = torch.arange(11).reshape(1, 11)


def test_cpu_and_disk_parts_give_bit_equal_outputs(saved: tuple[Model, Path], tmp_path: Path) -> None:
    """A map with both "cpu" and "disk" computes what the model in memory does, and writes nothing."""
    model, folder = saved
    with init_empty_weights():
        empty = Model()
    total = sum(p.numel() * 4 for p in model.parameters())
    device_map = infer_auto_device_map(empty, max_memory={"cpu": total * 2 // 3}, no_split_module_classes=["Block"])
    assert set(device_map.values()) == {"cpu", "disk"}
    before = sorted(tmp_path.rglob("*"))
    loaded = load_checkpoint_and_dispatch(empty, folder, device_map=device_map).eval()
    assert loaded.hf_device_map == device_map
    for _ in range(2):
        assert torch.equal(loaded(TOKENS), model(TOKENS))
    assert sorted(tmp_path.rglob("*")) == before
    on_disk = [name for name, p in loaded.named_parameters() if p.is_meta]
    assert on_disk
    assert all(p.is_meta for name, p in loaded.named_parameters() if name in on_disk)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-7]), CheckpointDamagedError, "not a whole safetensors"),
        (lambda file: file.write_bytes(b"GIF89a"), CheckpointDamagedError, "not a whole safetensors"),
        (lambda file: file.unlink(), CheckpointNotFoundError, "missing"),
        (
            lambda file: save_file({"scale": torch.zeros(3)}, file.with_name("model.safetensors")),
            CheckpointMismatchError,
            r"scale: \(3,\) in the checkpoint, \(1,\) in the model",
        ),
    ],
)
def test_a_bad_file_is_named_and_the_model_untouched(
    saved: tuple[Model, Path], spoil: object, error: type[Exception], message: str
) -> None:
    """Truncated, foreign, missing and misshapen files raise our error with a name, before anything changes."""
    model, folder = saved
    file = folder / "model-1.safetensors"
    assert callable(spoil)
    spoil(file)
    source = folder / "model.safetensors" if error is CheckpointMismatchError else folder
    target = copy.deepcopy(model)
    with pytest.raises(error, match=message) as caught:
        load_checkpoint_and_dispatch(target, source, device_map={"": "cpu"})
    if error is not CheckpointMismatchError:
        assert "model-1.safetensors" in str(caught.value)
    for (name, now), (_, then) in zip(target.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(now, then), name
    assert "hf_device_map" not in target.__dict__


SAVE = """
import sys
import torch
from torch import nn
from accel_bigmodel import load_checkpoint_and_dispatch
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
load_checkpoint_and_dispatch(model, sys.argv[1], device_map={"0": "cpu", "1": "disk"})
assert model[1].weight.is_meta
from accel_core.checkpoint.weights import save_model
save_model(model, None, sys.argv[2])
"""


def test_a_model_on_disk_is_saved_whole(tmp_path: Path) -> None:
    """Dispatching is all that a process has to import for the core to save weights that are on disk."""
    state = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict()
    save_file(state, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", SAVE, str(tmp_path / "model.safetensors"), str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert set(saved) == set(state)
    assert all(torch.equal(saved[name], state[name]) for name in state)
