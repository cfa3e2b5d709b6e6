"""Models spread over the CPU and the disk compute what they compute in memory."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accel_bigmodel import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    get_state_dict_offloaded_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    remove_hook_from_submodules,
)
from accel_core.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigurationError,
    DeviceMapError,
    DeviceUnavailableError,
)
from accel_core.modules.compilation import compile_regions
from accel_testing import limits


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


def test_cpu_and_disk_parts_give_bit_equal_outputs(
    saved: tuple[Model, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A map with both "cpu" and "disk" computes what the model in memory does, writes nothing and warns of nothing."""
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
    assert caplog.text == ""
    on_disk = [name for name, p in loaded.named_parameters() if p.is_meta]
    assert on_disk
    assert all(p.is_meta for name, p in loaded.named_parameters() if name in on_disk)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (
            lambda file: file.write_bytes(file.read_bytes()[:-7]),
            CheckpointDamagedError,
            "is damaged or in another format",
        ),
        (lambda file: file.write_bytes(b"GIF89a"), CheckpointDamagedError, "is damaged or in another format"),
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


@pytest.mark.slow
def test_a_model_on_disk_is_saved_whole(tmp_path: Path) -> None:
    """Dispatching is all that a process has to import for the core to save weights that are on disk."""
    state = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict()
    save_file(state, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", SAVE, str(tmp_path / "model.safetensors"), str(tmp_path / "saved")]
    limits.run(command, quiet=12, check=True)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert set(saved) == set(state)
    assert all(torch.equal(saved[name], state[name]) for name in state)


class Scaled(nn.Module):
    """A layer between parameters of the module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.rand(4))
        self.layer = nn.Linear(4, 4)
        self.after = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale, run the layer, shift."""
        return self.layer(x * self.before) + self.after


X = torch.arange(8.0).reshape(2, 4)


@pytest.mark.parametrize(
    "device_map",
    [
        {"before": "disk", "layer": "cpu", "after": "cpu"},
        {"before": "cpu", "layer": "disk", "after": "disk"},
        {"before": "disk", "layer.weight": "disk", "layer.bias": "cpu", "after": "disk"},
        {"before": "cpu", "layer.weight": "cpu", "layer.bias": "disk", "after": "cpu"},
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_single_tensors_may_be_offloaded(device_map: dict[str, str], inside: bool, tmp_path: Path) -> None:
    """Tensors with entries of their own, beside others of their module, are there when its forward runs."""
    plain: nn.Module = nn.Sequential(Scaled()) if inside else Scaled()
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    places = {f"0.{name}": device for name, device in device_map.items()} if inside else device_map
    with init_empty_weights():
        empty = nn.Sequential(Scaled()) if inside else Scaled()
    model = load_checkpoint_and_dispatch(empty, tmp_path, device_map=places)
    for _ in range(2):
        assert torch.equal(model(X), plain(X))
    assert any(parameter.is_meta for parameter in model.parameters())
    remove_hook_from_submodules(model)
    assert torch.equal(dispatch_model(copy.deepcopy(plain), places, offload_dir=tmp_path / "folder")(X), plain(X))


@pytest.mark.parametrize("device_map", [{"0": "cpu", "1": "cpu", "2": "disk"}, {"0": "disk", "1": "cpu", "2": "cpu"}])
def test_a_tie_over_memory_and_disk_is_kept_in_memory(
    device_map: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A map that tears tied weights apart is warned of, and works; loading and dispatching give the same."""

    def make() -> nn.Module:
        layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        layers[2].weight = layers[0].weight
        return layers

    plain = make()
    state = {name: value for name, value in plain.state_dict().items() if name != "2.weight"}
    save_file(state, tmp_path / "model.safetensors")
    with init_empty_weights():
        empty = make()
    for model in (
        load_checkpoint_and_dispatch(empty, tmp_path, device_map=device_map),
        dispatch_model(copy.deepcopy(plain), device_map, offload_dir=tmp_path / "folder"),
    ):
        for _ in range(2):
            assert torch.equal(model(X), plain(X))
    assert "Tied parameters are on different devices" in caplog.text


def test_relative_folders_are_those_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another folder, with other weights under the same names, a model and its copies compute with the same ones."""
    plain, other = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    for name, source in (("here", plain), ("there", other)):
        (tmp_path / name / "weights").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / name)
        save_file(source.state_dict(), "weights/model.safetensors")
        disk_offload(copy.deepcopy(source), "folder")
    monkeypatch.chdir(tmp_path / "here")
    loaded = load_checkpoint_and_dispatch(copy.deepcopy(plain).to("meta"), "weights", {"": "disk"})
    offloaded = disk_offload(copy.deepcopy(plain), "folder")
    dispatched = dispatch_model(copy.deepcopy(plain), {"": "disk"}, offload_dir="folder")
    monkeypatch.chdir(tmp_path / "there")
    for model in (loaded, offloaded, dispatched):
        assert torch.equal(copy.deepcopy(model)(X), plain(X))  # it opens the files again
        assert torch.equal(model(X), plain(X))


class Twice(nn.Module):
    """A model that holds one block under two names, in two parents."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        self.again = self.body[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block twice."""
        return self.again(self.body(x))


@pytest.mark.parametrize(
    "device_map",
    [
        {"body": "disk", "again": "cpu"},
        {"body": "cpu", "again": "disk"},
        {"body": "disk", "again.0.weight": "cpu", "again.0.bias": "disk", "again.1": "cpu"},
        {"": "disk"},
    ],
)
def test_a_module_with_two_names_may_have_two_devices(device_map: dict[str, str], tmp_path: Path) -> None:
    """One module computes for both names, wherever a map puts them, and both names are in the state dict."""
    plain = Twice().eval()
    torch.save(plain.state_dict(), tmp_path / "pytorch_model.bin")
    with init_empty_weights(include_buffers=True):
        empty = Twice().eval()
    for model in (
        load_checkpoint_and_dispatch(
            empty, tmp_path, device_map, offload_folder=tmp_path / "one", offload_buffers=True
        ),
        dispatch_model(copy.deepcopy(plain), device_map, offload_dir=tmp_path / "two", offload_buffers=True),
    ):
        for _ in range(2):
            assert torch.equal(model(X), plain(X))
        state = get_state_dict_offloaded_model(model)
        assert state.keys() == plain.state_dict().keys()
        assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"": "cpu", "1": "disk"}, "1.weight on disk and on cpu; 1.bias on disk and on cpu"),
        ({"0": "cpu", "1": "disk", "1.bias": "cpu"}, "1.bias on cpu and on disk"),
    ],
)
def test_a_map_that_doubles_a_tensor_is_refused(device_map: dict[str, str], message: str, tmp_path: Path) -> None:
    """Entries around and inside a module that disagree about the disk are an error that names the tensors."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for dispatch in (
        lambda: dispatch_model(model, device_map, offload_dir=tmp_path / "folder"),
        lambda: load_checkpoint_and_dispatch(model, tmp_path, device_map=device_map),
    ):
        with pytest.raises(DeviceMapError, match=f"two places; got {message}"):
            dispatch()
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert not (tmp_path / "folder").exists()


def test_a_model_without_its_hooks_moves_as_any_other(caplog: pytest.LogCaptureFixture) -> None:
    """What `.to` says about dispatched models is over when the hooks are gone."""
    model = dispatch_model(nn.Sequential(nn.Linear(4, 4)), {"": "cpu"}, force_hooks=True)
    remove_hook_from_submodules(model)
    assert model.to(torch.float64)[0].weight.dtype == torch.float64
    assert "shouldn't move" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_blocks_of_a_hooked_model_are_compiled(offload: bool) -> None:
    """Compiling the repeated blocks of a model whose root has a hook really runs the compiled blocks."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(len(inputs))
        return graph.forward

    model = Model(width=4, depth=2).requires_grad_(False).eval()
    expected = model(TOKENS)
    if offload:
        cpu_offload(model, torch.device("cpu"), preload_module_classes=["Block"])
    else:
        dispatch_model(model, {"": "cpu"}, force_hooks=True)
    try:
        compiled = compile_regions(model, backend=backend)
        for _ in range(2):
            assert torch.equal(compiled(TOKENS), expected)
        assert graphs
        assert torch.equal(model(TOKENS), expected)
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"0": "cpu", "1": "disk"}])
def test_a_model_without_weights_is_refused(device_map: dict[str, str], tmp_path: Path) -> None:
    """What has to be in memory and is empty is named, before anything changes."""
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ConfigurationError, match=r"no value for 0\.weight, 0\.bias"):
        dispatch_model(model, device_map, offload_dir=tmp_path)
    assert "_hf_hook" not in model[0].__dict__
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without accelerators")
@pytest.mark.parametrize("device", [0, "cuda:0", torch.device("cuda", 1)])
def test_a_device_that_is_not_here_is_named(device: int | str | torch.device, tmp_path: Path) -> None:
    """Loading and dispatching say which entry names it, before anything changes."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        empty = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    places = {"0": "cpu", "1": device}
    with pytest.raises(DeviceUnavailableError, match=r"for '1', and 0 devices"):
        load_checkpoint_and_dispatch(empty, tmp_path, device_map=places)
    with pytest.raises(DeviceUnavailableError, match=r"for '1', and 0 devices"):
        dispatch_model(model, places)
    assert all(parameter.is_meta for parameter in empty.parameters())


class Noted(nn.Linear):
    """A layer with extra state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        """Return what is saved beside the weights."""
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Take nothing back."""


@pytest.mark.parametrize("way", ["cpu", "disk", "map"])
def test_extra_state_stays_with_its_module(way: str, tmp_path: Path) -> None:
    """Weights are offloaded without it, and the whole state dict has it."""
    model, rows = Noted(3, 2), torch.randn(4, 3)
    expected, state = model(rows), copy.deepcopy(model.state_dict())
    if way == "cpu":
        cpu_offload(model, execution_device="cpu")
    elif way == "disk":
        disk_offload(model, tmp_path, execution_device="cpu")
    else:
        dispatch_model(model, {"": "disk"}, main_device="cpu", offload_dir=tmp_path)
    assert model.weight.is_meta
    assert torch.equal(model(rows), expected)
    whole = get_state_dict_offloaded_model(model)
    assert whole.keys() == state.keys()
    assert whole["_extra_state"] == {"calls": 3}
    assert torch.equal(whole["weight"], state["weight"])


def test_empty_tensors_are_of_the_cpu_under_any_default_device(tmp_path: Path) -> None:
    """A zero-size tensor of a file is read there like all others."""
    model, empty = nn.Linear(3, 2), nn.Linear(3, 2)
    for each in (model, empty):
        each.register_buffer("none", torch.empty(0, 3))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        load_checkpoint_and_dispatch(empty, tmp_path, device_map={"": "disk"}, offload_folder=tmp_path / "waits")
        found = empty(torch.ones(1, 3, device="cpu"))
    assert torch.equal(found, model(torch.ones(1, 3)))
