"""Checkpoints of every layout are loaded whole, in place, and refused when they are not safe."""

import copy
import gc
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import (
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    load_offloaded_weights,
    load_state_dict,
)
from accel_bigmodel.checkpoint.read import SafetensorsShard
from accel_core.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DeviceMapError,
    OffloadError,
    UnsafeCheckpointError,
)
from accel_testing.memory import MEASURES_MEMORY, Growth

X = torch.arange(8.0).reshape(2, 4)


def make() -> nn.Module:
    """Make a model with a buffer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()


def empty() -> nn.Module:
    """Make it without weights."""
    with init_empty_weights(include_buffers=True):
        return make()


Layout = Callable[[dict[str, torch.Tensor], Path], Path]


def one_safetensors(state: dict[str, torch.Tensor], folder: Path) -> Path:
    """Save one file."""
    save_file(state, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def one_bin(state: dict[str, torch.Tensor], folder: Path) -> Path:
    """Save one pickled file."""
    torch.save(state, folder / "weights.bin")
    return folder / "weights.bin"


def folder_of_one(state: dict[str, torch.Tensor], folder: Path) -> Path:
    """Save one file under the usual name."""
    save_file(state, folder / "model.safetensors")
    return folder


def folder_of_bin(state: dict[str, torch.Tensor], folder: Path) -> Path:
    """Save one pickled file under the usual name."""
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def shards(state: dict[str, torch.Tensor], folder: Path) -> Path:
    """Save two shards with an index."""
    weight_map = {}
    for number, part in enumerate((list(state)[:3], list(state)[3:])):
        name = f"model-{number}.safetensors"
        save_file({key: state[key] for key in part}, folder / name)
        weight_map.update(dict.fromkeys(part, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def index_of_shards(state: dict[str, torch.Tensor], folder: Path) -> Path:
    """Name the index itself."""
    return shards(state, folder) / "model.safetensors.index.json"


def hub_cache(state: dict[str, torch.Tensor], folder: Path) -> Path:
    """Lay the files out as hub caches do: links in a snapshot that lead to blobs."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    shards(state, blobs)
    for file in list(blobs.iterdir()):
        blob = file.rename(blobs / f"{abs(hash(file.name)):x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


@pytest.mark.parametrize(
    "layout", [one_safetensors, one_bin, folder_of_one, folder_of_bin, shards, index_of_shards, hub_cache]
)
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_every_layout_loads_bit_equal(layout: Layout, place: str, tmp_path: Path) -> None:
    """Files, folders, indices and hub caches, in memory and on disk, give the model's outputs."""
    model = make()
    source = layout(dict(model.state_dict()), tmp_path)
    offload = tmp_path / "offload"
    loaded = load_checkpoint_and_dispatch(empty(), source, device_map={"0": "cpu", "1": "cpu", "2": place},
                                          offload_folder=offload).eval()  # fmt: skip
    assert torch.equal(loaded(X), model(X))
    holds_pickles = place == "disk" and layout in (one_bin, folder_of_bin)
    assert offload.exists() == holds_pickles


def test_missing_and_unexpected_names_are_returned(tmp_path: Path) -> None:
    """Both lists are given; with `strict` they are an error, and the model is as it was."""
    state = dict(make().state_dict())
    state["extra"] = state.pop("0.bias")
    source = one_safetensors(state, tmp_path)
    model = make()
    keys = load_checkpoint_in_model(model, source)
    assert keys.missing_keys == ["0.bias"]
    assert keys.unexpected_keys == ["extra"]
    untouched = empty()
    with pytest.raises(CheckpointMismatchError, match=r"missing \['0.bias'\] and unexpected \['extra'\]"):
        load_checkpoint_in_model(untouched, source, strict=True)
    assert all(parameter.is_meta for parameter in untouched.parameters())


def test_weights_left_empty_are_an_error_at_dispatch(tmp_path: Path) -> None:
    """A checkpoint that lacks weights of an empty model cannot be dispatched; they are named, the model as it was."""
    state = dict(make().state_dict())
    del state["2.weight"], state["1.running_mean"]
    model = empty()
    with pytest.raises(CheckpointMismatchError, match=r"left empty.*2\.weight, 1\.running_mean"):
        load_checkpoint_and_dispatch(model, one_safetensors(state, tmp_path), device_map={"": "cpu"})
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_models_from_one_file_share_no_memory(tmp_path: Path) -> None:
    """What one model writes to its weights neither reaches another one, on disk, nor is lost when that one runs."""
    plain = make()
    source = one_safetensors(dict(plain.state_dict()), tmp_path)
    on_disk = load_checkpoint_and_dispatch(empty(), source, device_map={"0": "cpu", "1": "cpu", "2": "disk"}).eval()
    on_cpu = load_checkpoint_and_dispatch(empty(), source, device_map={"": "cpu"}).eval()
    other = load_checkpoint_and_dispatch(empty(), source, device_map={"": "cpu"}).eval()
    on_cpu[2].weight.data.zero_()
    with torch.no_grad():
        on_cpu[0].weight.add_(1)
    for _ in range(2):
        assert torch.equal(on_disk(X), plain(X))
    assert torch.equal(other(X), plain(X))
    assert not on_cpu[2].weight.any()


def test_every_wrong_shape_is_listed(tmp_path: Path) -> None:
    """All of them are named at once; a differing dtype is cast."""
    state = dict(make().state_dict())
    state["0.weight"], state["2.bias"] = torch.zeros(3, 4), torch.zeros(7)
    state["2.weight"] = state["2.weight"].double()
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match=r"2 that differ: 0.weight.*2.bias"):
        load_checkpoint_in_model(model, one_safetensors(state, tmp_path))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    good = {**dict(make().state_dict()), "2.weight": state["2.weight"]}
    load_checkpoint_in_model(model, one_safetensors(good, tmp_path))
    assert model[2].weight.dtype == torch.float32


def test_weights_are_cast_except_where_told(tmp_path: Path) -> None:
    """`dtype` casts floating point tensors, on the CPU and on disk, `keep_in_fp32_modules` none of theirs."""
    source = one_safetensors(dict(make().state_dict()), tmp_path)
    model = empty()
    load_checkpoint_in_model(model, source, dtype="bfloat16", keep_in_fp32_modules=["1"])
    assert model[0].weight.dtype == torch.bfloat16
    assert model[1].weight.dtype == torch.float32
    assert model[1].num_batches_tracked.dtype == torch.int64
    half = load_checkpoint_and_dispatch(
        empty(), source, device_map={"0": "cpu", "1": "cpu", "2": "disk"}, dtype=torch.bfloat16
    )
    plain = make().to(torch.bfloat16)
    assert torch.equal(half.eval()(X.bfloat16()), plain(X.bfloat16()))


OUTSIDE = ("/etc/passwd", "../outside.safetensors", "a/../../b.safetensors", "", "a\\b")


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        *(({"weight_map": {"0.weight": name}}, UnsafeCheckpointError, "leads outside its folder") for name in OUTSIDE),
        ([], CheckpointDamagedError, "not an index"),
        ("{", CheckpointDamagedError, "not JSON"),
        ({"weight_map": {"a": 3}}, CheckpointDamagedError, "not an index"),
        ({"weight_map": {"a": "\ud800"}}, CheckpointNotFoundError, r"missing.*index\.json"),
        ({"weight_map": {"a": "model-1.safetensors"}}, CheckpointNotFoundError, r"model-1\.safetensors.*index\.json"),
    ],
)
def test_an_index_that_is_wrong_is_named(content: object, error: type[Exception], message: str, tmp_path: Path) -> None:
    """Names that lead elsewhere are refused before anything is opened; other shapes and missing files are named."""
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(error, match=message):
        load_checkpoint_in_model(make(), tmp_path)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    """A pipe neither hangs nor is read, directly or behind an index."""
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UnsafeCheckpointError, match="regular file"):
        load_state_dict(tmp_path / "model.safetensors")
    (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": {"0.weight": "model.safetensors"}}))
    with pytest.raises(UnsafeCheckpointError, match="regular file"):
        load_checkpoint_in_model(make(), tmp_path / "x.index.json")


@pytest.mark.parametrize("save", [save_file, torch.save])
def test_a_shard_that_lacks_a_tensor_of_its_index_is_named(save: Callable[..., None], tmp_path: Path) -> None:
    """An index that places a tensor in a file without it raises with both names, and the model is as it was."""
    file = "model.safetensors" if save is save_file else "pytorch_model.bin"
    save({"0.weight": torch.ones(4, 4)}, tmp_path / file)
    weight_map = dict.fromkeys(("0.weight", "0.bias"), file)
    (tmp_path / f"{file}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointDamagedError, match=rf"does not hold.*'0\.bias' in .*{re.escape(file)}"):
        load_checkpoint_in_model(model, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_code_in_a_pickle_never_runs(tmp_path: Path) -> None:
    """A pickle that would call a function is refused."""

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "evil"),)

    torch.save({"0.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsafeCheckpointError, match="run code"):
        load_checkpoint_in_model(make(), tmp_path)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_classes_and_attributes_of_parameters_are_kept(tmp_path: Path, place: str, dtype: torch.dtype | None) -> None:
    """A parameter that is filled, or left on disk in another dtype, is of the class and has the attributes it had."""

    class Marked(nn.Parameter):
        pass

    save_file(make().state_dict(), tmp_path / "model.safetensors")
    model = make()
    model[0].weight = Marked(model[0].weight.detach())
    model[0].weight.note = "kept"
    load_checkpoint_in_model(model, tmp_path, {"": place}, offload_folder=tmp_path / "away", dtype=dtype)
    weight = model[0].weight
    assert (type(weight), weight.note, weight.dtype) == (Marked, "kept", dtype or torch.float32)


def test_a_map_with_missing_or_unknown_names_is_refused(tmp_path: Path) -> None:
    """The missing tensors are named; an unknown strategy lists the known ones."""
    source = one_safetensors(dict(make().state_dict()), tmp_path)
    with pytest.raises(DeviceMapError, match=r"2\.weight, 2\.bias"):
        load_checkpoint_and_dispatch(empty(), source, device_map={"0": "cpu", "1": "cpu"})
    with pytest.raises(DeviceMapError, match="'sequential'"):
        load_checkpoint_and_dispatch(empty(), source, device_map="best")


@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_maps_are_chosen_by_name(strategy: str, tmp_path: Path) -> None:
    """Each strategy's name gives a model that computes what it did."""
    model = make()
    source = one_safetensors(dict(model.state_dict()), tmp_path)
    loaded = load_checkpoint_and_dispatch(empty(), source, device_map=strategy, max_memory={"cpu": 150}).eval()
    assert torch.equal(loaded(X), model(X))
    assert "disk" in loaded.hf_device_map.values()


def test_an_offload_folder_is_loaded_back(tmp_path: Path) -> None:
    """`load_offloaded_weights` puts the weights of a folder into an empty model."""
    model = make()
    source = one_bin(dict(model.state_dict()), tmp_path)
    load_checkpoint_in_model(empty(), source, device_map={"": "disk"}, offload_folder=tmp_path / "folder")
    index = json.loads((tmp_path / "folder" / "index.json").read_text())
    fresh = make()
    nn.init.zeros_(fresh[0].weight)
    load_offloaded_weights(fresh, index, tmp_path / "folder")
    assert torch.equal(fresh[0].weight, model[0].weight)


@pytest.mark.slow
@MEASURES_MEMORY
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_peak_of_memory_is_what_stays_and_one_tensor(dtype: torch.dtype | None, tmp_path: Path) -> None:
    """Loading and casting 64 MiB takes what the model holds in the end, and the largest tensor."""
    file = tmp_path / "model.safetensors"
    layers, largest = 16, 4 * 2**20
    save_file({f"{number}.weight": torch.ones(1024, 1024) for number in range(layers)}, file)
    with init_empty_weights():
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(layers)])
    gc.collect()
    growth = Growth()
    load_checkpoint_in_model(model, file, dtype=dtype)
    assert sum(int(parameter.sum()) for parameter in model.parameters()) == layers * 1024 * 1024
    assert growth.most() <= sum(parameter.nbytes for parameter in model.parameters()) + 2 * largest


class Pair(nn.Module):
    """Two layers that may have one weight, and one count of forwards."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        if tied:
            self.second.weight = self.first.weight
        count = torch.zeros(1)
        self.first.register_buffer("count", count)
        self.second.register_buffer("count", count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count in one layer, and let the other one have its say."""
        self.first.count += 1
        out: torch.Tensor = self.second(self.first(x)) + self.second.count
        return out


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Take a step, and return the weights."""
    model(X).square().sum().backward()
    optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("layout", [one_safetensors, one_bin])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tied", [False, True])
def test_a_loaded_model_trains_as_one_that_took_a_state_dict(
    layout: Layout, device_map: dict[str, str] | None, dtype: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    """An optimizer made before goes on, what is tied stays tied, and what only the file shares is shared no more."""
    torch.manual_seed(0)
    state = {name: value.to(dtype) for name, value in Pair(tied=True).state_dict().items()}
    if layout is one_bin:  # keeps what is shared shared, and of a view what it is a view of
        whole = torch.cat([state["first.weight"].flatten(), torch.ones(1, dtype=dtype)])
        state["first.weight"] = state["second.weight"] = whole[:16].view(4, 4)
        state["first.count"] = state["second.count"] = whole[16:] * 0
    else:
        state = {name: value.clone() for name, value in state.items()}
    source = layout(state, tmp_path)
    steps = []
    for load in (
        lambda model: model.load_state_dict(state),
        lambda model: load_checkpoint_in_model(model, source, device_map),
    ):
        torch.manual_seed(1)
        model = Pair(tied)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        load(model)
        steps.append({name: value.clone() for name, value in _stepped(model, optimizer).items()})
    for name, value in steps[0].items():
        assert torch.equal(steps[1][name], value), name


def test_expanded_weights_of_a_pickle_train(tmp_path: Path) -> None:
    """A weight whose rows are one row in memory has rows of its own in a model."""
    state = {"weight": torch.arange(4.0).expand(4, 4), "bias": torch.zeros(4)}
    plain, model = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(state)
    load_checkpoint_in_model(model, one_bin(state, tmp_path))
    steps = [_stepped(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (plain, model)]
    assert torch.equal(steps[1]["weight"], steps[0]["weight"])


def test_a_pickle_may_be_written_over_by_its_model(tmp_path: Path) -> None:
    """What happens to the file after the load is nothing to the model, which may be saved in its place."""
    model = nn.Linear(256, 256)
    source = one_bin(before := {name: torch.rand_like(value) for name, value in model.state_dict().items()}, tmp_path)
    load_checkpoint_in_model(model, source)
    with open(source, "r+b") as file:
        file.write(bytes(source.stat().st_size))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_load_that_fails_half_way_leaves_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that had taken new values have those of before, and are the ones that they were."""
    source = one_safetensors(dict(make().state_dict()), tmp_path)
    model = make()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 3.0)
    before = dict(model.named_parameters())
    taken = []

    def failing(self: object, name: str) -> torch.Tensor:
        if len(taken) == 3:
            raise KeyboardInterrupt
        taken.append(name)
        return tensor(self, name)  # type: ignore[arg-type]

    tensor = SafetensorsShard.tensor
    monkeypatch.setattr(SafetensorsShard, "tensor", failing)
    with pytest.raises(KeyboardInterrupt):
        load_checkpoint_in_model(model, source)
    assert len(taken) == 3
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        assert torch.equal(parameter, torch.full_like(parameter, 3.0)), name


def _other() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()


@pytest.mark.parametrize("prefetch", [None, False])
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("layout", [one_safetensors, one_bin])
def test_another_models_file_is_not_computed_with(
    layout: Layout, copied: bool, prefetch: bool | None, tmp_path: Path
) -> None:
    """Whatever takes the place of a file after a dispatch, the model has its own weights; a copy refuses others."""
    model, folder = make(), tmp_path / "offload"
    source = layout(dict(model.state_dict()), tmp_path)
    arguments = {"device_map": {"": "disk"}, "offload_folder": folder, "prefetch": prefetch}
    first = load_checkpoint_and_dispatch(empty(), source, **arguments)  # type: ignore[arg-type]
    (tmp_path / "new").mkdir()
    os.replace(layout(dict(_other().state_dict()), tmp_path / "new"), source)
    second = load_checkpoint_and_dispatch(empty(), source, **arguments)  # type: ignore[arg-type]
    if copied:
        with pytest.raises(OffloadError, match="changed after the model was dispatched"):
            copy.deepcopy(first)(X)
    assert torch.equal(first(X), model(X))
    assert torch.equal(second(X), _other()(X))


@pytest.mark.parametrize("layout", [one_safetensors, one_bin])
def test_another_models_file_is_not_dispatched(layout: Layout, tmp_path: Path) -> None:
    """A file that took the place of the loaded one before the dispatch is refused."""
    arguments = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "offload"}
    first = empty()
    load_checkpoint_in_model(first, source := layout(dict(make().state_dict()), tmp_path), **arguments)  # type: ignore[arg-type]
    (tmp_path / "new").mkdir()
    new = layout(dict(_other().state_dict()), tmp_path / "new")
    os.utime(new, (1, 1))  # one of the same size and the same time would pass
    os.replace(new, source)
    load_checkpoint_in_model(empty(), source, **arguments)  # type: ignore[arg-type]
    with pytest.raises(OffloadError, match="changed after the model was dispatched"):
        dispatch_model(first, {"": "disk"}, offload_dir=tmp_path / "offload")
