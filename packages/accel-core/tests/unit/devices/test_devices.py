"""Devices and the table that chooses among them."""

import pytest
import torch

from accel_core.devices import registry
from accel_core.devices.device import Device
from accel_core.errors import DeviceUnavailableError


@pytest.mark.parametrize("name", [name for name, _ in registry.ORDER])
def test_every_row_holds_a_device_of_its_name(name: str) -> None:
    """Each row is imported, names its backend and label, and says whether it is here without an error."""
    device = registry.named(name)
    assert isinstance(device, Device)
    assert device.name == name
    assert device.backend
    assert device.label
    assert isinstance(device.is_available(), bool)


@pytest.mark.parametrize("name", [name for name, _ in registry.ORDER if name != "cpu"])
def test_files_of_untried_hardware_say_so(name: str) -> None:
    """Hardware that accel never ran on is marked in its class, and named so in its documentation."""
    device = registry.named(name)
    if not device.ran_on_hardware and name != "cuda":
        assert "Never run on hardware" in (type(device).__doc__ or "")


def test_cpu_is_chosen_where_it_is_asked_for() -> None:
    """cpu=True wins over whatever is here."""
    assert registry.choose(cpu=True).name == "cpu"
    assert registry.choose(wanted="cpu").place(3) == torch.device("cpu")


def test_device_that_is_not_here_is_refused_by_name() -> None:
    """A device that was asked for is never replaced by another one."""
    with pytest.raises(DeviceUnavailableError, match=r"'xpu:0'.*ACCELERATE_TORCH_DEVICE"):
        registry.choose(wanted="xpu:0")
    with pytest.raises(DeviceUnavailableError, match="'abacus'"):
        registry.named("abacus")
