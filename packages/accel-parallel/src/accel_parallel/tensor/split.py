"""Splitting a model over the ranks of tensor parallel, and models that arrive split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from accel_core.comm.control import in_step
from accel_core.errors import PreparationError
from accel_core.modules import empty
from accel_core.process.world import World
from accel_parallel.sharding.loading import receive, refuse_empty, starts_from_main, views_of
from accel_parallel.tensor.plan import TensorPlan


def is_split(model: nn.Module) -> bool:
    """Return whether a part of a model's parameters is spread over ranks."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def check_arrived(model: nn.Module, group: Sequence[int]) -> None:
    """Refuse a model that arrived split over other ranks than those of tensor parallel."""
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        mesh = parameter.device_mesh
        ranks = mesh.mesh.flatten().tolist()
        if mesh.ndim != 1 or ranks != list(group):
            raise PreparationError(
                f"A model that arrives split is split over the ranks of tensor parallel, here {list(group)}; got "
                f"{name} on a mesh of shape {tuple(mesh.shape)} with the ranks {ranks}. Load it with the sizes of "
                "parallelism_config, or let prepare() split it."
            )
        refuse_scattered(name, parameter)


def refuse_scattered(name: str, parameter: DTensor) -> None:
    """Refuse a part that lies in several places of its tensor: checkpoints would mix parts up."""
    mesh, later = parameter.device_mesh, dict[int, int]()
    placements: list[tuple[int, Any]] = [*enumerate(parameter.placements)]
    for axis, placement in reversed(placements):
        if placement.is_replicate():
            continue
        dim, cuts = placement.dim, getattr(placement, "split_factor", 1)
        if cuts != 1 and cuts != later.get(dim, 1):
            raise PreparationError(
                "A rank's part of a weight lies in one place of it, or checkpoints would mix parts up; got "
                f"{name} with {parameter.placements}, as packed projections are split. Load the model with tp_size=1, "
                "or whole, or with a tp_plan that leaves these layers whole."
            )
        later[dim] = later.get(dim, 1) * mesh.size(axis)


def move_unsplit(model: nn.Module, device: torch.device) -> None:
    """Move what is whole in a model that arrived split; its parts are on the devices of their mesh."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor) and tensor.device != device:
            tensor.data = tensor.data.to(device)


def split(
    model: nn.Module,
    plan: TensorPlan,
    mesh: DeviceMesh,
    world: World,
    copies: Sequence[dist.ProcessGroup],
    *,
    from_main: bool = False,
) -> None:
    """Split a bare model in place, with the values that the first rank has; every rank calls it."""
    refuse_empty(model, world)
    if empty.seed_of(model) is None and starts_from_main(
        model, world, asked=from_main
    ):  # torch cuts on each rank what that rank has
        receive(model.modules(), world.device)
    if not plan.styles:
        _align(model, copies)
    with in_step(world, "prepare: tensor parallel", views_of(model)), _own_random_state(world.device):
        cut(model, plan, mesh)


def cut(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Split a bare model in place, as a plan says."""
    for name, style in plan.styles:
        parallelize_module(model.get_submodule(name), mesh, style)
    for first, *others in plan.ties:
        parameter = model.get_parameter(first)
        for other in others:
            owner, _, own = other.rpartition(".")
            model.get_submodule(owner)._parameters[own] = parameter  # torch cuts each place by itself and ends ties


@torch.no_grad()
def _align(model: nn.Module, copies: Sequence[dist.ProcessGroup]) -> None:
    """Give ranks that hold the same part of a model the values of the first of them."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            continue
        part = parameter.to_local()
        sent = part.contiguous()
        for group in copies:
            dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
        if sent is not part:
            part.copy_(sent)


@contextmanager
def _own_random_state(device: torch.device) -> Iterator[None]:
    """Keep this rank's random numbers: where torch first spreads a tensor, it gives all ranks of a GPU the same."""
    if device.type == "cpu":
        yield
        return
    with torch.random.fork_rng(devices=[device], device_type=device.type):
        yield
