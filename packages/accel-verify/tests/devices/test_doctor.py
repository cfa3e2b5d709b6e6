"""What `accel doctor` sees of a GPU, and what a verified run reads from one."""

import pytest
import torch

from accel_testing import limits
from accel_verify.diagnosis.libraries import Probe
from accel_verify.parallel.values import generator_state, sums
from accel_verify.resume.recorder import digest

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("fresh_state"),
]

DEVICE = torch.device("cuda", 0)


def test_the_doctor_computes_on_the_device() -> None:
    """Each GPU has a finding with its name and its memory, and computes."""
    found = [each for each in Probe(["torch"]).findings(limits.limit(20)) if each.topic == "Devices"]
    told = [each for each in found if each.what.startswith(f"cuda:0, {torch.cuda.get_device_name(DEVICE)} computes; ")]
    assert len(told) == 1
    assert told[0].state in ("ok", "warning")  # tests beside this one may have taken most of its memory
    assert told[0].what.endswith(" GiB are free")


def test_values_of_the_device_are_recorded() -> None:
    """Digests and sums are those of the same values on the CPU, and a generator's state is told apart after a draw."""
    values = torch.arange(64, dtype=torch.bfloat16)
    nest = {"a": [values, 3], "b": (values,)}
    moved = {"a": [values.to(DEVICE), 3], "b": (values.to(DEVICE),)}
    assert digest(moved) == digest(nest)
    assert sums(values.to(DEVICE)) == sums(values)
    before = generator_state(DEVICE)
    assert generator_state(DEVICE) == before
    torch.rand(1, device=DEVICE)
    assert generator_state(DEVICE) != before
