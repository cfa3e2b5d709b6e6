"""Tests of loading, running, offloading and saving packed models, with bitsandbytes on a CPU."""

import copy
import json
import sys
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from packed_models import Model, by_hand

from accel_bigmodel import init_empty_weights
from accel_core.accelerator import Accelerator
from accel_core.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigurationError,
    DeviceMapError,
    DeviceUnavailableError,
    OffloadError,
    QuantizationError,
)
from accel_quant import (
    BnbQuantizationConfig,
    get_quantized_model_device_map,
    load_and_quantize_model,
    quantize_and_offload_8bit,
    replace_with_bnb_layers,
)

pytestmark = pytest.mark.filterwarnings("ignore:MatMul8bitLt")

CONFIGS = {
    "8bit": {"load_in_8bit": True},
    "8bit-no-threshold": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "fp32"},
    "nf4-double-bf16": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bf16",
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp32"},
}
MAPS = {
    "none": None,
    "cpu": {"": "cpu"},
    "auto": "auto",
    "disk": {"scale": "cpu", "emb": "cpu", "blocks.0": "cpu", "blocks.1": "disk", "head": "cpu"},
    "all-disk": {"": "disk"},
}


INPUT = torch.arange(16)[None]


@pytest.fixture
def trained():
    """A model with fixed weights."""
    torch.manual_seed(0)
    return Model().eval()


def _config(name, **more):
    return BnbQuantizationConfig(torch_dtype=torch.float32, **{**CONFIGS[name], **more})


def _empty():
    with init_empty_weights():
        return Model().eval()


@torch.no_grad()
def _run(model):
    return model(INPUT)


@pytest.mark.parametrize("name", CONFIGS)
def test_equal_to_bitsandbytes_by_hand(trained, weights, name, caplog):
    """Loaded packed, packed in memory or copied, a model computes bit for bit what bitsandbytes by hand does."""
    model = load_and_quantize_model(_empty(), _config(name), weights_location=weights)
    assert type(model.head) is nn.Linear
    kind = bnb.nn.Linear8bitLt if name.startswith("8bit") else bnb.nn.Linear4bit
    assert isinstance(model.blocks[0].up, kind)
    early, expected = copy.deepcopy(model), _run(by_hand(trained, _config(name)))
    for each in (model, early, copy.deepcopy(model)):
        assert torch.equal(_run(each), expected)
    assert "loaded already" not in caplog.text
    in_memory = load_and_quantize_model(copy.deepcopy(trained), _config(name))
    assert torch.equal(_run(in_memory), expected)
    eight = name.startswith("8bit")
    assert (in_memory.is_loaded_in_8bit, in_memory.is_loaded_in_4bit) == (eight, not eight)
    assert "loaded already" in caplog.text
    error = (_run(model) - _run(trained)).norm() / _run(trained).norm()
    assert 0 < error < 0.15


@pytest.mark.parametrize("name", ["8bit", "nf4-double-bf16"])
@pytest.mark.parametrize("place", MAPS)
def test_every_device_map_computes_the_same(weights, tmp_path, name, place):
    """Wherever packed parts wait, on the CPU or on disk, the output is the same to the bit, forward after forward."""
    expected = _run(load_and_quantize_model(_empty(), _config(name), weights_location=weights))
    model = load_and_quantize_model(
        _empty(), _config(name), weights_location=weights, device_map=MAPS[place], offload_folder=tmp_path / "off"
    )
    for _ in range(2):
        assert torch.equal(_run(model), expected)
    if "disk" in place:
        away = [parameter for name, parameter in model.named_parameters() if "blocks.1" in name]
        assert all(parameter.is_meta for parameter in away)
        layer = model.blocks[1].up
        assert getattr(getattr(layer, "state", None), "CB", None) is None
        files = list((tmp_path / "off").glob("blocks.1.up.weight*.dat"))
        assert sum(file.stat().st_size for file in files) < 32 * 72 * 2


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("when", ["before", "after", "on disk"])
def test_saving_and_loading_is_exact(weights, tmp_path, name, when):
    """`Accelerator.save_model` writes a packed model, used or not, from which loading gives the same bits."""
    places = {"device_map": MAPS["disk"], "offload_folder": tmp_path / "off"} if when == "on disk" else {}
    model = load_and_quantize_model(_empty(), _config(name), weights_location=weights, **places)
    if when != "before":
        _run(model)
    Accelerator(cpu=True).save_model(model, tmp_path / "saved")
    expected = _run(model)
    again = load_and_quantize_model(_empty(), _config(name), weights_location=tmp_path / "saved")
    assert torch.equal(_run(again), expected)
    size = (tmp_path / "saved" / "model.safetensors").stat().st_size
    assert size < (weights / "model.safetensors").stat().st_size


@pytest.mark.parametrize("form", ["file", "index", "folder", "pickle"])
def test_places_of_weights(trained, weights, tmp_path, form):
    """Weights come from a file, an index, a folder or a pickled state dict."""
    expected = _run(load_and_quantize_model(_empty(), _config("nf4"), weights_location=weights))
    place = weights
    if form == "file":
        place = weights / "model.safetensors"
    elif form == "pickle":
        place = tmp_path / "model.bin"
        torch.save(trained.state_dict(), place)
    elif form == "index":
        state, names = trained.state_dict(), {}
        for number, part in enumerate((list(state)[::2], list(state)[1::2])):
            file = f"part-{number}.safetensors"
            save_file({name: state[name] for name in part}, tmp_path / file)
            names |= dict.fromkeys(part, file)
        place = tmp_path / "model.safetensors.index.json"
        place.write_text(json.dumps({"weight_map": names, "metadata": {}}))
    assert torch.equal(_run(load_and_quantize_model(_empty(), _config("nf4"), weights_location=place)), expected)


def test_modules_that_stay(weights):
    """Skipped modules get `torch_dtype`, and those kept in float32 stay in it."""
    config = BnbQuantizationConfig(
        load_in_8bit=True, torch_dtype="bf16", skip_modules=["head", "blocks.0"], keep_in_fp32_modules=["norm", "down"]
    )
    model = load_and_quantize_model(_empty(), config, weights_location=weights)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes["blocks.0.up.weight"] is torch.bfloat16
    assert dtypes["blocks.0.down.weight"] is torch.float32
    assert dtypes["blocks.1.down.weight"] is torch.float32
    assert dtypes["blocks.1.norm.weight"] is torch.float32
    assert dtypes["blocks.1.up.weight"] is torch.int8
    assert dtypes["head.weight"] is dtypes["emb.weight"] is torch.bfloat16
    assert type(model.blocks[1].down) is nn.Linear


def test_tied_weights_stay_one(tmp_path):
    """A head that is tied to the embedding is left unpacked and stays the same parameter."""

    class Tied(Model):
        """The head is the embedding."""

        def __init__(self):
            super().__init__()
            self.head.weight = self.emb.weight

    torch.manual_seed(0)
    trained = Tied().eval()
    state = {name: value for name, value in trained.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    with init_empty_weights():
        model = Tied().eval()
    model = load_and_quantize_model(model, _config("8bit"), weights_location=tmp_path)
    assert model.head.weight is model.emb.weight
    assert torch.equal(model.emb.weight, trained.emb.weight)


class Shared(Model):
    """A head tied to the embedding, two tied layers, and one layer under two names."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, 16, bias=False)
        self.head.weight = self.emb.weight
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.once = self.twice = nn.Linear(32, 32)

    def forward(self, index):
        """Run."""
        x = self.emb(index) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.twice(self.once(x)))


@pytest.mark.parametrize("name", ["8bit", "nf4"])
@pytest.mark.parametrize("skip", [[], None], ids=["packed", "left out"])
@pytest.mark.parametrize("place", ["memory", "cpu", "disk", "torn"])
def test_what_is_shared_computes_as_its_parts_do(tmp_path, name, skip, place):
    """Tied layers that are packed, and layers with two names, compute as the same layers without ties."""
    torch.manual_seed(0)
    trained = Shared().eval()
    apart = copy.deepcopy(trained)
    for parent, leaf in ((apart, "head"), (apart.blocks[1], "up"), (apart, "twice")):
        setattr(parent, leaf, copy.deepcopy(getattr(parent, leaf)))
    unpacked = ["head", "blocks.0.up", "blocks.1.up", "once", "twice"] if skip is None else []
    apart = load_and_quantize_model(apart, _config(name, skip_modules=unpacked))
    state = {key: value for key, value in trained.state_dict().items() if not key.startswith(("head", "twice"))}
    del state["blocks.1.up.weight"]
    save_file(state, tmp_path / "model.safetensors")
    model = trained
    if place != "memory":
        with init_empty_weights():
            model = Shared().eval()
    places = {"": "disk" if place == "disk" else "cpu"}
    if place == "torn":
        places = {"emb": "disk", "scale": "cpu", "blocks.0": "disk", "blocks.1": "cpu", "head": "cpu", "once": "disk"}
        places |= {"twice": "cpu"}
    model = load_and_quantize_model(
        model,
        _config(name, skip_modules=skip),
        weights_location=tmp_path,
        device_map=places,
        offload_folder=tmp_path / "folder",
    )
    assert model.once is model.twice
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(_run(model), _run(apart), rtol=1e-4, atol=1e-5)


def test_device_map_counts_packed_bytes(weights):
    """A model that does not fit unpacked fits packed: a map of any word counts what packed weights occupy."""
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bf16")
    limits = {"cpu": 12_000}
    model = replace_with_bnb_layers(_empty(), config, ["head"])
    places = get_quantized_model_device_map(model, config, "auto", max_memory=limits)
    assert set(places.values()) == {"cpu"}
    unpacked = get_quantized_model_device_map(_empty(), config, "auto", max_memory=limits)
    assert "disk" in unpacked.values()
    for words in ((), ("balanced",), ("balanced_low_0",), ("sequential",)):
        assert get_quantized_model_device_map(model, config, *words) == {"": "cpu"}


def test_quantize_and_offload_8bit(trained, tmp_path):
    """A weight is packed, written with its scales and left empty; what was packed before is written as it is."""
    model = replace_with_bnb_layers(_empty(), _config("8bit"))
    value, index = trained.blocks[0].up.weight.detach(), {}
    quantize_and_offload_8bit(model, value, "blocks.0.up.weight", torch.float16, tmp_path, index, None)
    assert set(index) == {"blocks.0.up.weight", "blocks.0.up.SCB"}
    assert index["blocks.0.up.weight"] == {"dtype": "int8", "shape": [72, 32]}
    assert model.blocks[0].up.weight.is_meta
    first = (tmp_path / "blocks.0.up.weight.dat").read_bytes()
    packed = bnb.nn.Int8Params(value.half(), requires_grad=False, has_fp16_weights=False).to("cpu")
    assert first == bytes(packed.data.flatten().view(torch.uint8).tolist())
    other = replace_with_bnb_layers(_empty(), _config("8bit"))
    name = "blocks.0.up.weight"
    quantize_and_offload_8bit(other, packed.data, name, torch.float16, tmp_path, {}, packed.SCB)
    assert (tmp_path / "blocks.0.up.weight.dat").read_bytes() == first
    with pytest.raises(QuantizationError, match="not a packed weight"):
        quantize_and_offload_8bit(other, value, "emb.weight", torch.float16, tmp_path, {}, None)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weights_location": None}, QuantizationError, "there is none. Pass a file"),
        ({"weights_location": "none"}, CheckpointNotFoundError, "none"),
        ({"config": {"skip_modules": ["lm_head"]}}, QuantizationError, "skip_modules names modules"),
        ({"config": {"keep_in_fp32_modules": ["norms"]}}, QuantizationError, "keep_in_fp32_modules names modules"),
        ({"device_map": "everywhere"}, DeviceMapError, "'everywhere'"),
        ({"device_map": {"emb": "cpu"}}, DeviceMapError, "blocks"),
        ({"device_map": {"": 99}}, DeviceUnavailableError, "got 99"),
        ({"device_map": {"": "cuda:99"}}, DeviceUnavailableError, "got 'cuda:99'"),
        ({"device_map": {"": "everywhere"}}, DeviceMapError, "got 'everywhere'"),
        ({"device_map": {"": "disk"}}, OffloadError, "Pass `offload_folder`"),
        ({"device_map": {"": "disk"}, "offload_folder": "file"}, OffloadError, "cannot be written"),
        ({"drop": "blocks.0.up.weight"}, CheckpointMismatchError, r"blocks\.0\.up\.weight is missing"),
        ({"reshape": "blocks.0.up.weight"}, CheckpointMismatchError, r"has shape \(2, 2\) for \(72, 32\)"),
        ({"whole": "head.weight"}, CheckpointMismatchError, r"head\.weight holds integers for torch\.float32"),
    ],
)
def test_bad_input_changes_nothing(trained, weights, tmp_path, monkeypatch, change, error, message):
    """What cannot be done is an error that says why, before a layer or a weight of the model is changed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    state = dict(trained.state_dict())
    if "drop" in change:
        del state[change["drop"]]
    if "reshape" in change:
        state[change["reshape"]] = torch.ones(2, 2)
    if "whole" in change:
        state[change["whole"]] = state[change["whole"]].to(torch.int8)
    save_file(state, weights / "model.safetensors")
    model = _empty()
    before = {name: (type(module), id(module)) for name, module in model.named_modules()}
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert all(trained.values())
    arguments = {"weights_location": weights}
    arguments |= {key: value for key, value in change.items() if key in ("weights_location", "device_map")}
    if "offload_folder" in change:
        arguments["offload_folder"] = tmp_path / change["offload_folder"]
    with pytest.raises(error, match=message):
        load_and_quantize_model(model, _config("8bit", **change.get("config", {})), **arguments)
    assert {name: (type(module), id(module)) for name, module in model.named_modules()} == before
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == trained
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize(
    ("saved", "others", "told"),
    [
        ("nf4", ("8bit", "fp4", "nf4-double-bf16"), ""),
        ("nf4-double-bf16", ("nf4",), ": its scales are packed too"),  # which would be read as wider numbers
    ],
)
def test_weights_packed_in_another_way(weights, tmp_path, saved, others, told):
    """A checkpoint of 4 bits does not load as 8, nor packed scales as plain ones or back; the model stays as it was."""
    model = load_and_quantize_model(_empty(), _config(saved), weights_location=weights)
    Accelerator(cpu=True).save_model(model, tmp_path / "saved")
    for other in others:
        empty = _empty()
        with pytest.raises(CheckpointMismatchError, match=f"packed in another way{told}"):
            load_and_quantize_model(empty, _config(other), weights_location=tmp_path / "saved")
        assert type(empty.blocks[0].up) is nn.Linear


def _state(words):
    """Return a change of the words that bitsandbytes stores beside a packed weight."""
    return lambda part: torch.tensor(list(json.dumps({**json.loads(bytes(part.tolist())), **words}).encode()))


DAMAGE = [
    ("nf4", ".absmax", lambda part: part[:3]),
    ("nf4-double-bf16", ".absmax", lambda part: part[:3]),
    ("nf4", ".absmax", lambda part: part.to(torch.uint8)),
    ("nf4", ".absmax", lambda part: part[:1].expand(len(part))),
    ("nf4", ".quant_map", lambda part: part[:7]),
    ("nf4", ".quant_map", lambda part: part.double()),
    ("nf4", "", lambda part: part[:-1]),
    ("nf4", "", lambda part: part.to(torch.int8)),
    ("nf4", ".quant_state.bitsandbytes__nf4", lambda part: torch.full_like(part, 255)),
    ("nf4", ".quant_state.bitsandbytes__nf4", lambda part: part.float()),
    ("nf4", ".quant_state.bitsandbytes__nf4", lambda part: torch.tensor(list(b"[" * 9000), dtype=torch.uint8)),
    *(
        ("nf4", ".quant_state.bitsandbytes__nf4", _state(words))
        for words in (
            {"blocksize": 32},
            {"blocksize": 0},
            {"blocksize": [64]},
            {"quant_type": "fp4"},
            {"dtype": "load"},
            {"dtype": ["float32"]},
            {"shape": [72]},
            {"shape": [1 << 40, 1 << 40]},
            {"shape": "wide"},
            {"absmax": 1},
        )
    ),
    ("nf4-double-bf16", ".nested_absmax", lambda part: torch.cat([part, part])),
    ("nf4-double-bf16", ".nested_quant_map", lambda part: part[:16]),
    *(
        ("nf4-double-bf16", ".quant_state.bitsandbytes__nf4", _state(words))
        for words in (
            {"nested_blocksize": 32},
            {"nested_blocksize": -1},
            {"nested_dtype": "int8"},
            {"nested_offset": None},
        )
    ),
    ("8bit", "SCB", lambda part: part[:3]),
    ("8bit", "SCB", lambda part: part.to(torch.uint8)),
    ("8bit", "SCB", lambda part: part[:, None]),
    ("8bit", "", lambda part: part[:, :3]),
]


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize(("name", "suffix", "change"), DAMAGE)
def test_statistics_that_do_not_fit_are_refused(weights, tmp_path, name, suffix, change):
    """Too few scales, other dtypes, sizes and words than a packed weight needs are an error, and nothing is changed."""
    model = load_and_quantize_model(_empty(), _config(name), weights_location=weights)
    Accelerator(cpu=True).save_model(model, tmp_path / "saved")
    file = next((tmp_path / "saved").glob("*.safetensors"))
    state = load_file(file)
    key = "blocks.1.up.SCB" if suffix == "SCB" else f"blocks.1.up.weight{suffix}"
    file.unlink()
    changed = change(state[key])
    changed = changed.to(torch.uint8) if "quant_state" in key and not changed.is_floating_point() else changed
    torch.save({**state, key: changed}, file.with_name("pytorch_model.bin"))
    empty = _empty()
    with pytest.raises(CheckpointDamagedError, match=r"do not fit their statistics; got 1 .*blocks\.1\.up\.weight has"):
        load_and_quantize_model(empty, _config(name), weights_location=tmp_path / "saved")
    assert type(empty.blocks[0].up) is nn.Linear
    assert all(parameter.is_meta for parameter in empty.parameters())


@pytest.mark.usefixtures("fresh_state")
def test_what_cannot_be_saved_is_refused_before_writing(tmp_path):
    """A weight that bitsandbytes packed again with rounded scales is an error, and no file is written."""
    model = nn.Sequential(nn.Linear(64, 64))
    model = load_and_quantize_model(model, _config("nf4", skip_modules=[]))
    model[0].weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(QuantizationError, match="rounded its scales"):
        Accelerator(cpu=True).save_model(model, tmp_path / "saved")
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("name", ["8bit", "nf4"])
def test_packed_models_are_prepared_where_they_are(weights, tmp_path, name):
    """On this process's device they are; with parts on disk, in the whole or in part, they are a ValueError."""
    accelerator = Accelerator(cpu=True)
    here = load_and_quantize_model(_empty(), _config(name), weights_location=weights)
    here.requires_grad_(False)
    assert torch.equal(_run(accelerator.prepare(here)), _run(here))
    for place in ("disk", "all-disk"):
        away = load_and_quantize_model(
            _empty(), _config(name), weights_location=weights, device_map=MAPS[place], offload_folder=tmp_path / place
        )
        away.requires_grad_(False)
        with pytest.raises(ValueError, match="8 or 4 bits"):
            accelerator.prepare(away)
    for module in (here, *here.modules()):
        module.__dict__.pop("hf_device_map", None)
    here.hf_device_map = {"": 1}
    with pytest.raises(ValueError, match="8 or 4 bits"):
        accelerator.prepare(here)


class Mixture(nn.Module):
    """Two layers, each of which gives every token to one of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(64, 4) for _ in range(2))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))

    def forward(self, tokens):
        """Sum what the experts make of the tokens."""
        for router in self.routers:
            numbers, made = router(tokens).argmax(-1), torch.zeros_like(tokens)
            for number in numbers.unique().tolist():
                made[numbers == number] = self.experts[number](tokens[numbers == number])
            tokens = tokens + made
        return tokens


@torch.no_grad()
@pytest.mark.parametrize("name", ["8bit", "4bit"])
def test_packed_experts_come_through_a_cache(tmp_path, name):
    """Bit for bit as in memory, packed in the cache, and each is read once while there is room."""
    torch.manual_seed(0)
    save_file(Mixture().state_dict(), tmp_path / "model.safetensors")
    four = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp32", "bnb_4bit_quant_type": "nf4"}
    options = {"8bit": {"load_in_8bit": True}, "4bit": four}[name]
    config = BnbQuantizationConfig(torch_dtype=torch.float32, skip_modules=["routers"], **options)

    def load(places, **arguments):
        with init_empty_weights():
            model = Mixture()
        return load_and_quantize_model(
            model, config, weights_location=tmp_path / "model.safetensors", device_map=places, **arguments
        )

    whole = load({"": "cpu"})
    model = load({"routers": "cpu", "experts": "disk"}, offload_folder=tmp_path / "off", expert_cache="64KiB")
    tokens = torch.randn(32, 64)
    for _ in range(2):
        assert torch.equal(model(tokens), whole(tokens))
    report = model.expert_report()
    assert (report.misses, report.hits) == (4, 12)
    assert report.held < 4 * 64 * 64 * 2
    with pytest.raises(ConfigurationError, match="holds at least one"):
        load({"routers": "cpu", "experts": "disk"}, offload_folder=tmp_path / "off", expert_cache=100)
