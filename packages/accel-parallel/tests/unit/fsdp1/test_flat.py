"""Weights of which ranks hold runs of elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel_core.mesh.flat import FlatPart
from accel_parallel.fsdp1.flat import spread_weights


@pytest.mark.parametrize(("device", "sends"), [("cpu", True), ("meta", False)])
def test_runs_on_devices_are_not_sent_from_rank_to_rank(device: str, sends: bool) -> None:
    """The first rank alone gets them on hosts; on devices, ranks gather them in the group that they have."""
    group: Any = None
    part = FlatPart(torch.empty(4, device=device), (2, 4), [4, 4], 0)
    ((_, weight),) = spread_weights({"weight": part}, [0, 1], group)
    assert (weight.gather_on_first is not weight.gather) == sends
