"""Where models are before they train, and which of them cannot."""

from typing import Any

import pytest
import torch
from torch import nn

from accel_core.errors import PreparationError
from accel_core.strategies.placement import move, refuse_misplaced, refuse_offloaded

GPU = torch.device("cuda", 1)


def _model(places: dict[str, Any], **attributes: object) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for name, value in {"hf_device_map": places, **attributes}.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize(
    ("places", "attributes", "moves"),
    [
        ({}, {}, True),
        ({"": "cpu"}, {}, True),
        ({"": "cpu"}, {"_hf_hook": object()}, False),
        ({"0": "cpu", "1": "cpu"}, {}, False),
        ({"": "disk"}, {}, False),
    ],
)
def test_models_that_no_map_spreads_are_moved(places: dict[str, Any], attributes: dict[str, Any], moves: bool) -> None:
    """A map with one place is where the model was loaded; parts placed one by one, by hooks or on disk stay."""
    model = _model(places, **attributes)
    move(model, torch.device("meta"))
    assert all(parameter.is_meta is moves for parameter in model.parameters())


def test_weights_on_disk_are_refused_only_where_they_are_trained() -> None:
    """A wholly frozen model passes; one trained parameter is enough to refuse it."""
    model = _model({"": "disk"}).requires_grad_(False)
    refuse_offloaded(model)
    model[1].bias.requires_grad_(True)
    with pytest.raises(PreparationError, match=r"got a device map that names the disk\. .*requires_grad_"):
        refuse_offloaded(model)


@pytest.mark.parametrize(
    ("places", "device", "shown"),
    [
        ({"": 0}, GPU, "0"),
        ({"": "cuda:0"}, GPU, "cuda:0"),
        ({"": "cpu"}, GPU, "cpu"),
        ({"0": 1, "1": "disk"}, GPU, "1, disk"),
        ({"": "disk"}, GPU, "disk"),
    ],
)
@pytest.mark.parametrize("bits", ["is_loaded_in_8bit", "is_loaded_in_4bit"])
def test_packed_weights_in_the_wrong_place_are_refused(
    bits: str, places: dict[str, Any], device: torch.device, shown: str
) -> None:
    """The error names where they are and where the process computes; the same map is no matter in full precision."""
    with pytest.raises(PreparationError, match=f"but this process uses {device}; got weights on {shown}\\. Load"):
        refuse_misplaced(_model(places, **{bits: True}), device)
    refuse_misplaced(_model(places), device)


@pytest.mark.parametrize(
    ("places", "device"),
    [({}, GPU), ({"": 1}, GPU), ({"": "cuda:1"}, GPU), ({"": torch.device("cuda", 1)}, GPU), ({"0": 0, "1": 1}, GPU)],
)
def test_packed_weights_in_the_right_place_pass(places: dict[str, Any], device: torch.device) -> None:
    """This process's device, by any spelling, and several devices of one process."""
    refuse_misplaced(_model(places, is_loaded_in_4bit=True), device)


def test_packed_weights_on_a_cpu_train_there_alone() -> None:
    """The CPU is a device like any other: bitsandbytes itself says which of its kernels compute there."""
    model = _model({"": "cpu"}, is_loaded_in_8bit=True)
    refuse_misplaced(model, torch.device("cpu"))
    with pytest.raises(PreparationError, match="got weights on cpu"):
        refuse_misplaced(model, GPU)
