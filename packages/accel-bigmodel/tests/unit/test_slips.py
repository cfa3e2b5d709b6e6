"""Slips with big models: each gets one warning or one named error that says the fix."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import (
    get_balanced_memory,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel_core.errors import UnsupportedTypeError


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        out: torch.Tensor = self.layer(x)
        return out


def _net() -> nn.Module:
    return nn.Sequential(Block(), Block())


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return the warnings, with none of earlier tests."""
    from accel_bigmodel.device_map import tree

    tree.logger.__dict__.pop("_logged", None)
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.mark.parametrize("place", [infer_auto_device_map, get_balanced_memory])
def test_limits_in_a_list_are_refused(place: Any) -> None:
    """Sizes without their devices are refused with the form that is wanted."""
    with pytest.raises(UnsupportedTypeError, match=r"maps devices to sizes; got \[1000, 1000\] \(list\).*\"cpu\""):
        place(_net(), [1000, 1000])


@pytest.mark.parametrize(("named", "advice"), [(["Blok"], "Did you mean 'Block'?"), (["T5"], "Block, Linear, Seq")])
def test_classes_that_no_module_has_are_warned_of_once(
    named: list[str], advice: str, heard: pytest.LogCaptureFixture
) -> None:
    """A class that the model lacks keeps nothing whole: one warning names the classes that the model has."""
    for _ in range(2):
        infer_auto_device_map(_net(), {"cpu": 1000}, no_split_module_classes=named)
    assert [advice in record.getMessage() for record in heard.records] == [True]


@pytest.mark.parametrize("named", [["Block"], ["Block", "T5Block"], "Block", None, ["Sequential"]])
def test_classes_that_some_module_has_are_not_warned_of(
    named: list[str] | None, heard: pytest.LogCaptureFixture
) -> None:
    """Lists that models bring name classes of all their forms, so one that fits in part is right."""
    infer_auto_device_map(_net(), {"cpu": 1000}, no_split_module_classes=named)
    assert not heard.records


def _one() -> nn.Module:
    return nn.Sequential(Block())


class _Shared(nn.Module):
    """Two names of one weight, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


@pytest.mark.parametrize(
    ("make", "names", "lacking", "advice"),
    [
        (_one, ["encoder.zzz"], "0.layer.weight, 0.layer.bias", "got encoder.zzz instead"),
        (_one, ["model.0.layer.weight"], "0.layer.weight, 0.layer.bias", "begin with 'model.'"),
        (_one, [], "0.layer.weight, 0.layer.bias", "got nothing instead"),
        (_one, ["0.layer.weight"], "0.layer.bias", "got nothing instead"),
        (_one, ["0.layer.weight", "head"], "0.layer.bias", "got head instead"),
        (_Shared, ["two.weight"], "mean", "got nothing instead"),
    ],
)
@pytest.mark.parametrize("way", ["in place", "with a map", "empty", "dispatch"])
def test_missing_names_are_warned_of_once(
    make: Callable[[], nn.Module],
    names: list[str],
    lacking: str,
    advice: str,
    way: str,
    heard: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """One warning names what a checkpoint lacks, aside from tied names and buffers that are not saved."""
    save_file({name: torch.ones(2, 2) for name in names}, tmp_path / "model.safetensors")
    with init_empty_weights() if way == "empty" else contextlib.nullcontext():
        model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if way == "dispatch":
        load_checkpoint_and_dispatch(model, tmp_path, device_map={"": "cpu"})
    else:
        load_checkpoint_in_model(model, tmp_path, device_map=None if way == "in place" else {"": "cpu"})
    (said,) = (record.getMessage() for record in heard.records)
    assert f"which keep their values or stay empty: {lacking}; got" in said
    assert advice in said
    for name in lacking.split(", "):
        after = model.state_dict()[name]
        assert after.is_meta if before[name].is_meta else torch.equal(after, before[name])


def test_unexpected_names_alone_are_listed(heard: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """A checkpoint that holds all of the model and more is loaded, and its leftovers are named."""
    state = {**{name: torch.ones_like(value) for name, value in _one().state_dict().items()}, "head": torch.ones(1)}
    save_file(state, tmp_path / "model.safetensors")
    found = load_checkpoint_in_model(_one(), tmp_path)
    assert found.unexpected_keys == ["head"]
    assert ["were not used" in record.getMessage() for record in heard.records] == [True]
