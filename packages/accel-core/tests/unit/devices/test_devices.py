"""Devices and the table that chooses among them."""

from pathlib import Path

import pytest
import torch

from accel_core.devices import registry
from accel_core.devices.device import Device
from accel_core.devices.memory import clear_device_cache
from accel_core.errors import DeviceUnavailableError
from accel_core.host.environ import text
from accel_core.options.enums import DistributedType
from accel_core.options.hardware import HARDWARE, Hardware
from accel_testing.conformance.device import DeviceConformance

_PAGE = (
    next(parent for parent in Path(__file__).parents if (parent / "packages").is_dir()) / "docs/reference/hardware.md"
)


@pytest.mark.parametrize("row", HARDWARE, ids=lambda row: row.name)
class TestBuiltIn(DeviceConformance):
    """Every row of the table answers as a device has to."""

    @pytest.fixture(autouse=True)
    def _choose(self, row: Hardware) -> None:
        self.device = registry.named(row.name)

    def test_it_is_the_device_of_its_row(self, row: Hardware) -> None:
        """Name, backend and label are the row's."""
        assert (self.device.name, self.device.backend, self.device.label) == (row.name, row.backend, row.label)

    def test_the_page_of_hardware_has_its_line(self, row: Hardware) -> None:
        """The documentation says of each kind whether it ever ran."""
        lines = [line for line in _PAGE.read_text().splitlines() if line.startswith(f"| {row.title}")]
        assert len(lines) == 1
        assert ("never run on hardware" in lines[0]) is not row.ran_on_hardware


def test_every_label_of_a_device_has_one_row() -> None:
    """Each member of DistributedType that names hardware is the label of one kind."""
    named = [member for member in DistributedType if member.name.startswith("MULTI_")]
    assert sorted(member.name for member in named) == sorted(
        row.label.name for row in HARDWARE if row.label.name.startswith("MULTI_")
    )


def test_a_kind_without_code_needs_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that torch drives through a module of its name is served by the generic class."""
    row = Hardware("npu", "Abacus", DistributedType.MULTI_NPU, "gloo")
    monkeypatch.setattr(torch, "npu", torch.cpu, raising=False)
    device = Device(row)
    assert device.is_available()
    assert device.module is torch.cpu
    assert device.count() == 1


def test_devices_are_looked_for_without_setting_cuda_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory can be given back in a notebook whose launcher forks later: torch is told to ask the driver alone."""
    told: list[str | None] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(told.append(text("PYTORCH_NVML_BASED_CUDA_CHECK"))))
    clear_device_cache()
    assert told == ["1"]


def test_device_that_is_not_here_is_refused_by_name() -> None:
    """A device that was asked for is never replaced by another one."""
    with pytest.raises(DeviceUnavailableError, match=r"'xpu:0'.*ACCELERATE_TORCH_DEVICE"):
        registry.choose(wanted="xpu:0")
    with pytest.raises(DeviceUnavailableError, match="'abacus'"):
        registry.named("abacus")
