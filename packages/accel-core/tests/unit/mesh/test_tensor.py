"""Tensors that are spread over a mesh."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from accel_core.mesh.tensor import local_memory, spread_over
from accel_core.process import world

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_what_is_offloaded_stays_on_the_host() -> None:
    """A part of a weight that FSDP2 keeps on the CPU is spread as the weight is, in another format, on no device."""
    world.ensure(cpu=True, needs=world.GroupNeeds(alone=True))
    weight = torch.ones(4, 3)
    spec = DTensorSpec(
        DeviceMesh("cuda", [0], _init_backend=False),
        (Shard(0),),
        TensorMeta(weight.shape, weight.stride(), weight.dtype),
    )
    average = torch.rand(4, 3, dtype=torch.float64)
    made = spread_over(average, DTensor(weight, spec, requires_grad=False))
    assert (made.device.type, made.dtype, made.placements) == ("cpu", torch.float64, (Shard(0),))
    assert torch.equal(local_memory(made), average)
    world.destroy()
