"""The registry of packed parameter formats."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import nn

from accel_core.modules import packed
from accel_core.modules.sizes import tensor_bytes


class Halved(nn.Parameter):
    """A parameter that stores two values in a byte."""


class HalvedFormat:
    """Tells accel about `Halved`."""

    name = "halved"

    def matches(self, parameter: torch.Tensor) -> bool:
        """Tell whether it is a `Halved`."""
        return isinstance(parameter, Halved)

    def nbytes(self, parameter: torch.Tensor) -> int:
        """Count half a byte per value."""
        return parameter.numel() // 2

    def move(self, parameter: torch.Tensor, device: torch.device) -> nn.Parameter:
        """Move the data."""
        return Halved(parameter.data.to(device), requires_grad=False)

    def pack(
        self, parameter: torch.Tensor, value: torch.Tensor, device: torch.device, statistics: torch.Tensor | None = None
    ) -> nn.Parameter:
        """Round to bytes."""
        return Halved(value.to(device, torch.uint8), requires_grad=False)

    def parts(self, parameter: torch.Tensor) -> Sequence[str]:
        """Name the bytes."""
        return ("",)

    def unpack(self, parameter: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Give the bytes."""
        return {"": parameter.data}

    def rebuild(
        self, parameter: torch.Tensor, stored: Mapping[str, torch.Tensor], device: torch.device
    ) -> nn.Parameter:
        """Wrap the bytes."""
        return Halved(stored[""].to(device), requires_grad=False)


def test_a_registered_format_sizes_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes come from the format that matches; other tensors keep their own."""
    monkeypatch.setattr(packed, "_formats", {})
    weight = Halved(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    assert packed.find(weight) is None
    form = HalvedFormat()
    assert isinstance(form, packed.PackedParameter)
    packed.register(form)
    assert packed.find(weight) is form
    assert tensor_bytes(weight) == 4
    assert packed.find(torch.zeros(8)) is None
    packed.unregister("halved")
    assert packed.find(weight) is None
