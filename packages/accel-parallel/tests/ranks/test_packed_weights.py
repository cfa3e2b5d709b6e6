"""Weights that bitsandbytes packed, under engines that shard or split them."""

from __future__ import annotations

import importlib
import warnings
from itertools import product
from typing import Any

import pytest
import torch
from several_ranks import fsdp, refused, split
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from accel_core.accelerator import Accelerator
from accel_core.errors import PreparationError
from accel_core.process import world as process_world
from accel_core.state import reset_all
from accel_core.strategies.quantized import refuse_packed
from accel_testing import requires, world

pytestmark = requires("bitsandbytes")

WIDTH = 64
STORAGES = [torch.uint8, torch.bfloat16, torch.float16, torch.float32]
CASTS = [None, torch.bfloat16, torch.float16, torch.float32]


class Adapted(nn.Module):
    """A packed layer, which does not train, and an adapter, which does."""

    def __init__(self, storage: torch.dtype = torch.uint8, seed: int = 0) -> None:
        super().__init__()
        library: Any = importlib.import_module("bitsandbytes")
        torch.manual_seed(seed)
        given = {"bias": False, "compute_dtype": torch.float32, "quant_storage": storage}
        self.base = library.nn.Linear4bit(WIDTH, WIDTH, **given).to("cpu")
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return numbers for numbers."""
        found: torch.Tensor = self.base(x) + self.b(self.a(x))
        return found


def _refused(net: nn.Module, *, cast: torch.dtype | None, integers: bool = True) -> bool:
    """Return whether a model is refused where ranks compute on GPUs."""
    try:
        refuse_packed(net, process_world.ensure(), torch.device("cuda"), cast=cast, integers=integers)
    except PreparationError:
        return True
    return False


@world(2)
def test_packed_layers_that_nobody_marked_are_refused() -> None:
    """Layers of 4 and 8 bits are known by their parameters, whatever their storage, and stay as they were."""
    layers: Any = importlib.import_module("bitsandbytes").nn
    eight = nn.Sequential(layers.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False))
    nets = [*((Adapted(storage), 4) for storage in STORAGES), (eight, 8)]
    for version, (net, bits) in product([1, 2], nets):
        reset_all()
        accelerator = Accelerator(fsdp_plugin=fsdp(version))
        with refused(PreparationError, f"got {type(net).__name__} in {bits} bits on cpu", accelerator, net):
            accelerator.prepare(net)


@requires("torch:2.13")
@world(2)
def test_what_torch_shards_rightly_is_what_is_accepted() -> None:
    """For every storage and cast: torch's shards compute what the whole did if and only if they are not refused."""
    Accelerator()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    for storage in STORAGES:
        for cast in CASTS:
            net = Adapted(storage)
            expected, refused = net(x), _refused(net, cast=cast)
            fully_shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=cast))
            try:
                right = torch.allclose(net(x).float(), expected, atol=0.1 * float(expected.abs().max()))
            except RuntimeError:
                right = False
            assert right != refused, (storage, cast)


@world(2)
def test_statistics_that_ranks_do_not_share_are_refused() -> None:
    """Bits of one rank with the scales of another are noise; so are bits whose scales are missing."""
    accelerator = Accelerator()
    rank = accelerator.process_index
    assert not _refused(Adapted(), cast=None)
    assert _refused(Adapted(), cast=None, integers=False)
    assert _refused(Adapted(seed=rank), cast=None)
    empty, bare = Adapted(), Adapted()
    if rank:
        empty.base.weight = type(empty.base.weight)(empty.base.weight.detach().to("meta"))
    assert _refused(empty, cast=None)
    bare.base.weight.quant_state = None
    assert _refused(bare, cast=None)


@world(2)
def test_packed_layers_under_tensor_parallel() -> None:
    """A packed layer stays whole and trains as on one process; a plan that splits it is refused."""
    warnings.filterwarnings("ignore", "bitsandbytes::", UserWarning)  # torch warns of a kernel without a derivative
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    alone, plan = Adapted(), {"a": "colwise", "b": "rowwise"}
    alone(x).square().mean().backward()
    net = Adapted()
    for given in (plan | {"base": "colwise"}, plan):
        reset_all()
        accelerator = Accelerator(parallelism_config=split(given))
        if "base" in given:
            with pytest.raises(PreparationError, match=r"Packed weights cannot be split .* got base, a Linear4bit"):
                accelerator.prepare(net)
            continue
        model = accelerator.prepare(net)
        accelerator.backward(model(x).square().mean())
        for own, parameter in zip(alone.parameters(), model.parameters(), strict=True):
            if own.grad is not None:
                gradient: Any = parameter.grad
                torch.testing.assert_close(gradient.full_tensor(), own.grad)
