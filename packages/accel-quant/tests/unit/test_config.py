"""Tests of the configuration, which needs no bitsandbytes."""

import sys

import pytest
import torch

from accel_core.errors import MissingDependencyError, QuantizationError
from accel_core.options.enums import CustomDtype
from accel_quant import BnbQuantizationConfig
from accel_quant.library import bitsandbytes


def test_defaults_of_eight_bits(monkeypatch):
    """8 bits compute what is not packed in float16; without bitsandbytes, what needs it says how to get it."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    config = BnbQuantizationConfig(load_in_8bit=True)
    assert config.target_dtype is torch.int8
    assert config.torch_dtype is torch.float16
    assert config.llm_int8_threshold == 6.0
    assert config.skip_modules is None
    assert config.keep_in_fp32_modules is None
    with pytest.raises(MissingDependencyError, match=r"pip install 'bitsandbytes>=0.47'"):
        bitsandbytes()


@pytest.mark.parametrize(
    ("word", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_defaults_of_four_bits(word, dtype):
    """4 bits compute what is not packed in the compute dtype, given as a word or a dtype."""
    for given in (word, dtype):
        config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype=given)
        assert config.bnb_4bit_compute_dtype is dtype
        assert config.torch_dtype is dtype
        assert config.target_dtype is CustomDtype.INT4
    assert BnbQuantizationConfig(load_in_4bit=True, torch_dtype=word).torch_dtype is dtype


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "can't be both False"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "can't be both True"),
        ({"load_in_8bit": 1}, "load_in_8bit must be a boolean; got 1"),
        ({"load_in_4bit": "yes"}, "load_in_4bit must be a boolean"),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": None}, "bnb_4bit_use_double_quant must be a boolean"),
        ({"load_in_8bit": True, "llm_int8_threshold": "6"}, "llm_int8_threshold must be a float or an int"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "must be in .*fp4.*nf4.* got 'int4'"),
        (
            {"load_in_4bit": True, "bnb_4bit_compute_dtype": "int8"},
            "bnb_4bit_compute_dtype must be .* in .*; got 'int8'",
        ),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": 16}, "must be a torch.dtype or a string in .*; got 16"),
        ({"load_in_8bit": True, "torch_dtype": "double"}, "torch_dtype must be .* in .*; got 'double'"),
        ({"load_in_8bit": True, "skip_modules": "head"}, "skip_modules must be a list of strings; got 'head'"),
        ({"load_in_8bit": True, "keep_in_fp32_modules": [1]}, "keep_in_fp32_modules must be a list of strings"),
    ],
)
def test_what_cannot_be_meant(fields, message):
    """Neither, both, an unknown word or a wrong type is an error that names the field."""
    with pytest.raises(QuantizationError, match=message):
        BnbQuantizationConfig(**fields)


def test_threshold_of_four_bits_warns():
    """A threshold has no meaning with 4 bits."""
    with pytest.warns(UserWarning, match="llm_int8_threshold can only be used for model loaded in 8bit"):
        BnbQuantizationConfig(load_in_4bit=True, llm_int8_threshold=3.0)
