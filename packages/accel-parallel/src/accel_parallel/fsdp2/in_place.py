"""Sharding one model in place, block by block, by torch's `fully_shard`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from accel_core.comm.control import in_step
from accel_core.modules import empty
from accel_core.process.world import World
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_parallel.sharding.loading import ScatterFromRank0, receive, starts_from_main, views_of
from accel_parallel.sharding.wrapping import WrapPlan


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether a bare model was sharded in place."""
    return isinstance(model, FSDPModule)


def reshard(model: torch.nn.Module) -> None:
    """Free what a pass without gradients left gathered, so that parameters are this rank's shards; nothing is sent."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def shard(
    model: torch.nn.Module,
    plan: WrapPlan,
    plugin: FullyShardedDataParallelPlugin,
    mesh: DeviceMesh,
    world: World,
    *,
    from_main: bool | None = None,
) -> None:
    """Shard the blocks of a plan, those inside others first, and then the rest; every rank calls it.

    Where nobody knows yet whether all ranks start from what the first one has, they find out.
    """
    if world.is_main:
        plan.log(model)
    arguments = arguments_of(plugin, mesh, world.device)
    policy = arguments.pop("mp_policy")
    exact = MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=False)
    made_here = empty.seed_of(model) is not None
    if from_main is None:
        from_main = not made_here and starts_from_main(model, world, bool(plugin.cpu_ram_efficient_loading))
    with in_step(world, "prepare: fully_shard", views_of(model)):
        for block in (*(block for _, block in plan.groups()), model):
            handover = None
            if from_main and world.device.type == "cpu" and not torch.__future__.get_swap_module_params_on_conversion():
                handover = ScatterFromRank0(block, mesh, plan.whole(model))
            if from_main:
                # Devices have links to each other: there, torch's broadcast is the fastest way.
                receive(block.modules(), world.device, () if handover is None else handover.parameters)
            whole = set(plan.whole(model)) if plan.replicated else None
            own = exact if plan.keeps(block) else policy
            sharded = fully_shard(block, mp_policy=own, ignored_params=whole, **arguments)
            if gloo_reduces(world.device):
                sharded.set_force_sum_reduction_for_comms(True)
            if handover is not None:
                handover.finish(world.device)
    if made_here:
        empty.initialize(model, world.device, torch.device("cpu") if plugin.offloads else None)
    for parameter in plan.whole(model):
        parameter.data = parameter.data.to(world.device)


def gloo_reduces(device: torch.device) -> bool:
    """Return whether gloo reduces gradients: in torch 2.8 it leaves the sum where it is asked for an average."""
    return device.type == "cpu" or f"{device.type}:gloo" in dist.get_backend_config()


def arguments_of(plugin: FullyShardedDataParallelPlugin, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `fully_shard` by name."""
    policy, offload = plugin.mixed_precision_policy, plugin.cpu_offload
    if isinstance(offload, CPUOffloadPolicy) and device.type == "cpu":
        offload = CPUOffloadPolicy(pin_memory=False)  # only memory that an accelerator reads can be pinned
    return {
        "mesh": mesh,
        "reshard_after_forward": plugin.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy() if policy is None else policy,
        "offload_policy": offload,
    }
