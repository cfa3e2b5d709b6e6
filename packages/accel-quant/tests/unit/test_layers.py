"""Tests of replacing layers."""

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

from accel_core.errors import QuantizationError
from accel_quant import (
    BnbQuantizationConfig,
    get_keys_to_not_convert,
    get_parameter_device,
    has_4bit_bnb_layers,
    replace_with_bnb_layers,
)
from accel_quant.layers import check_names, is_named

EIGHT = BnbQuantizationConfig(load_in_8bit=True, llm_int8_threshold=4.0)
FOUR = BnbQuantizationConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="bf16"
)


class Model(nn.Module):
    """An embedding, two layers and a head, which may be tied."""

    def __init__(self, tied=False, prefix=None):
        super().__init__()
        self.emb = nn.Embedding(8, 64)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64, bias=False))
        self.head = nn.Linear(64, 8, bias=False)
        if tied:
            self.head.weight = self.emb.weight
        if prefix:
            self.base_model_prefix = prefix

    def forward(self, index):
        """Run."""
        return self.head(self.body(self.emb(index)))


def _kinds(model):
    return {name: type(layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}


def test_every_linear_layer_is_replaced(caplog):
    """Linear layers become ones of bitsandbytes with the settings asked for, once; a model without any is told."""
    model = replace_with_bnb_layers(Model(), EIGHT)
    assert set(_kinds(model).values()) == {bnb.nn.Linear8bitLt}
    assert model.body[0].state.threshold == 4.0
    assert isinstance(model.body[0].weight, bnb.nn.Int8Params)
    assert model.body[2].bias is None
    assert type(model.emb) is nn.Embedding
    model = replace_with_bnb_layers(Model(), FOUR)
    layer = model.body[0]
    assert set(_kinds(model).values()) == {bnb.nn.Linear4bit}
    assert layer.compute_dtype is torch.bfloat16
    assert (layer.weight.quant_type, layer.weight.compress_statistics) == ("nf4", True)
    assert replace_with_bnb_layers(model, FOUR).body[0] is layer
    four_bits = [has_4bit_bnb_layers(each) for each in (Model(), replace_with_bnb_layers(Model(), EIGHT), model)]
    assert four_bits == [False, False, True]
    caplog.clear()
    replace_with_bnb_layers(nn.Sequential(nn.ReLU()), EIGHT)
    assert "No linear layer" in caplog.text


def test_weights_and_bias_stay_until_they_are_moved():
    """Replacing keeps the values; moving to the device packs them, without a gradient."""
    model = Model()
    assert get_parameter_device(model) == torch.device("cpu")
    before = model.body[0].weight.detach().clone()
    replace_with_bnb_layers(model, EIGHT)
    assert torch.equal(model.body[0].weight.data, before)
    model.to("cpu")
    weight = model.body[0].weight.to("cpu")
    assert weight.dtype is torch.int8
    assert not any(parameter.requires_grad for parameter in model.body.parameters())


@pytest.mark.parametrize("config", [EIGHT, FOUR], ids=["8bit", "4bit"])
def test_modules_left_out(config):
    """A name stands for its module and everything below it, also under a prefix."""
    model = replace_with_bnb_layers(Model(), config, modules_to_not_convert=["body.2", "head"])
    assert [name for name, kind in _kinds(model).items() if kind is nn.Linear] == ["body.2", "head"]
    model = replace_with_bnb_layers(Model(), config, modules_to_not_convert=["body"])
    assert type(model.body[0]) is nn.Linear
    part = replace_with_bnb_layers(Model().body, config, ["top.body.0"], current_key_name=["top", "body"])
    assert [type(layer) is nn.Linear for layer in (part[0], part[2])] == [True, False]


def test_list_that_matches_nothing():
    """Names of modules that are not there are an error that names them."""
    with pytest.raises(QuantizationError, match=r"skip_modules names modules .* got no module for \['lm_head'\]"):
        check_names(Model(), "skip_modules", ["body", "lm_head"])
    check_names(Model(), "skip_modules", None)


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [("a.b", "a", True), ("a.b", "b", True), ("a.b", "a.b", True), ("ab.b", "a", False), ("x.lm_head", "head", False)],
)
def test_names_match_whole_parts(name, key, expected):
    """A key is a run of whole parts of a name."""
    assert is_named(name, key) is expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: Model(), ["head"]),
        (lambda: Model(tied=True), ["emb", "head"]),
        (lambda: Model(prefix="transformer"), []),
        (lambda: Model(tied=True, prefix="transformer"), ["emb", "head"]),
        (lambda: Model(prefix="body"), ["head"]),
    ],
)
def test_keys_to_not_convert(model, expected):
    """The head and tied weights stay; a base model has no head."""
    assert sorted(get_keys_to_not_convert(model())) == expected


class Doubled(nn.Linear):
    """Computes something else than its parent."""

    def forward(self, rows):
        """Run."""
        return 2 * super().forward(rows)


class Spelled(nn.Linear):
    """Computes the same in other words."""

    def forward(self, rows):
        """Run."""
        return rows @ self.weight.T if self.bias is None else rows @ self.weight.T + self.bias


class Odd(nn.Module):
    """Layers that are linear by class and not by what becomes of their weights."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
        self.doubled, self.spelled = Doubled(64, 64), Spelled(64, 64, bias=False)

    def forward(self, rows):
        """Run."""
        return self.spelled(self.doubled(self.normed(self.encoder(rows))))


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize("config", [EIGHT, FOUR], ids=["int8", "nf4"])
def test_layers_that_compute_something_else_stay(config, caplog):
    """What is packed computes as before; what torch or a subclass does otherwise with a weight is left and named."""
    torch.manual_seed(0)
    model, rows = Odd().eval(), torch.randn(2, 3, 64)
    with torch.no_grad():
        wanted = model(rows)
        kinds = _kinds(replace_with_bnb_layers(model, config).to("cpu"))
        found = model(rows)
    packed = {name for name, kind in kinds.items() if kind.__module__.startswith("bitsandbytes")}
    assert packed == {"encoder.linear1", "encoder.linear2", "spelled"}
    assert "not packed: ['doubled', 'encoder.self_attn.out_proj', 'normed']" in caplog.text
    assert (found - wanted).abs().max() < 0.2 * wanted.abs().max()
