"""Slips with big models: each gets one warning or one named error that says the fix."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import (
    get_balanced_memory,
    infer_auto_device_map,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    plan_device_map,
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


@pytest.mark.parametrize("place", [infer_auto_device_map, get_balanced_memory, plan_device_map])
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


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (["encoder.zzz"], "encoder.zzz where the model has 0.layer.weight"),
        (["model.0.layer.weight"], "begin with 'model.'"),
        ([], "got no weights"),
    ],
)
@pytest.mark.parametrize("dispatches", [False, True])
def test_a_checkpoint_without_one_name_of_the_model_is_warned_of_once(
    names: list[str], advice: str, dispatches: bool, heard: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A model with values keeps them, and one warning says that nothing was loaded."""
    save_file({name: torch.ones(2, 2) for name in names}, tmp_path / "model.safetensors")
    model = _net()
    before = [value.clone() for value in model.parameters()]
    if dispatches:
        load_checkpoint_and_dispatch(model, tmp_path, device_map={"": "cpu"})
    else:
        load_checkpoint_in_model(model, tmp_path)
    assert all(map(torch.equal, before, model.parameters()))
    (said,) = (record.getMessage() for record in heard.records)
    assert "holds none of the weights of Sequential" in said
    assert advice in said


def test_a_checkpoint_with_some_names_of_the_model_is_told_as_before(
    heard: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """One matching name is a load in part, whose leftovers are listed."""
    save_file({"0.layer.bias": torch.ones(2), "head": torch.ones(1)}, tmp_path / "model.safetensors")
    found = load_checkpoint_in_model(_net(), tmp_path)
    assert found.unexpected_keys == ["head"]
    assert ["were not used" in record.getMessage() for record in heard.records] == [True]
