"""What every kind of hardware has to do, as a class of tests to subclass.

    from accel_testing.conformance.device import DeviceConformance

    class TestMyDevice(DeviceConformance):
        device = MyDevice()

What needs the hardware is skipped, by name, where it is not there.
"""

from __future__ import annotations

import pytest
import torch

from accel_core.devices import registry
from accel_core.devices.device import Device
from accel_core.errors import DeviceUnavailableError
from accel_core.options.enums import DistributedType


class DeviceConformance:
    """Tests of one kind of hardware; set `device` in a subclass."""

    device: Device

    def _require(self) -> None:
        if not self.device.is_available():
            pytest.skip(f"needs {self.device.name}, which is not on this machine")

    def test_names(self) -> None:
        """It has torch's name, a process-group backend and a label."""
        assert self.device.name
        assert self.device.backend
        assert isinstance(self.device.label, DistributedType)

    def test_availability_is_told_without_an_error(self) -> None:
        """Asking whether it is here never fails, and twice gives the same."""
        found = self.device.is_available()
        assert isinstance(found, bool)
        assert self.device.is_available() is found

    def test_absent_hardware_is_refused_by_name(self) -> None:
        """Asking for it where it is not gives an error that names it, and never another device."""
        if self.device.is_available():
            pytest.skip(f"{self.device.name} is on this machine")
        with pytest.raises(DeviceUnavailableError, match=self.device.name):
            registry.choose(wanted=self.device.name)

    def test_a_process_is_placed(self) -> None:
        """Each local rank, also beyond the number of devices, gets a device of this kind that holds tensors."""
        self._require()
        assert self.device.count() >= 1
        for local_rank in (0, self.device.count() - 1, self.device.count()):
            placed = self.device.place(local_rank)
            assert placed.type == self.device.name
            assert torch.ones(2, device=placed).sum().item() == 2
        self.device.place(0)

    def test_the_generator_is_saved_and_restored(self) -> None:
        """After its state is put back, the generator draws the same numbers again."""
        self._require()
        state = self.device.rng_state()
        if state is None:
            pytest.skip(f"{self.device.name} has no generator of its own")
        assert state.dtype == torch.uint8
        assert state.device.type == "cpu"
        place = self.device.place(0)
        first = torch.rand(4, device=place)
        self.device.set_rng_state(state)
        assert torch.equal(torch.rand(4, device=place), first)

    def test_queues_and_caches(self) -> None:
        """Waiting for the device and emptying its cache work, and lose nothing."""
        self._require()
        kept = torch.arange(8, device=self.device.place(0))
        self.device.synchronize()
        self.device.empty_cache()
        assert kept.tolist() == list(range(8))

    def test_precisions(self) -> None:
        """What it says of number formats is an answer, and bfloat16 is computed where it says so."""
        self._require()
        assert isinstance(self.device.supports_fp16, bool)
        assert isinstance(self.device.has_scaler, bool)
        if self.device.supports_bf16():
            one = torch.ones(2, 2, dtype=torch.bfloat16, device=self.device.place(0))
            assert (one @ one).float().tolist() == [[2.0, 2.0], [2.0, 2.0]]
