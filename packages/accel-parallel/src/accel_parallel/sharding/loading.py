"""Weights that only the first rank has, on their way to the others."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from accel_core.comm.control import Channel, in_step
from accel_core.errors import CheckpointMismatchError, PartView, PreparationError
from accel_core.mesh.tensor import fill, local_part, spread_like
from accel_core.modules import empty
from accel_core.process.world import World
from accel_core.strategies.fingerprint import fingerprint

_logger = logging.getLogger(__name__)
_SHOWN = 8


def views_of(model: nn.Module) -> dict[str, PartView]:
    """Describe the parameters and buffers of a model, which must be alike on all ranks."""
    return views_in(dict([*model.named_parameters(), *model.named_buffers()]))


def views_in(tensors: Mapping[str, Any]) -> dict[str, PartView]:
    """Describe the tensors of a state, which must be alike on all ranks."""
    return {
        name: PartView(str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for name, value in tensors.items()
        if isinstance(value, torch.Tensor)
    }


def refuse_empty(model: nn.Module, world: World) -> None:
    """Refuse a model without weights, which no rank initializes; every rank calls it."""
    everywhere = Channel(world, "prepare: weights").exchange((has_no_values(model), empty.seed_of(model)))
    if len({seed for _, seed in everywhere}) > 1:
        ranks = [rank for rank, (_, seed) in enumerate(everywhere) if seed != everywhere[0][1]]
        raise PreparationError(
            f"All ranks make a model under empty_init() with one seed, or none does; got {type(model).__name__}, made "
            f"otherwise on the ranks {ranks} than on rank 0. Make it alike on every rank."
        )
    if everywhere[0] == (True, None):
        raise PreparationError(
            f"A model without weights cannot be trained; got {type(model).__name__} on the meta device of rank 0. "
            'Load it there without a meta device, or call model.to_empty(device="cpu") and give it its weights, before '
            "prepare()."
        )


def starts_from_main(model: nn.Module, world: World, asked: bool) -> bool:
    """Return whether all ranks take the values of the first; every rank calls it."""
    if world.size == 1:
        return False
    channel = Channel(world, "prepare: weights")
    if channel.any(asked or has_no_values(model)):  # one rank without values is enough, and all have to agree
        return True
    # Where values differ, copies of a shard, and what is not sharded, would stay different forever.
    if len(set(channel.exchange(fingerprint(model)))) == 1:
        return False
    _logger.info("The ranks hold different values of %s; all start from those of rank 0.", type(model).__name__)
    return True


def has_no_values(model: nn.Module) -> bool:
    """Return whether a weight or buffer is on the meta device."""
    return any(tensor.is_meta for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


class Empty:
    """Gives the meta tensors of modules memory without values, or what `make` returns, by module; ties stay."""

    def __init__(
        self,
        device: torch.device,
        but: Iterable[torch.Tensor] = (),
        make: Callable[..., torch.Tensor] = torch.empty_like,
    ) -> None:
        self._make = functools.partial(make, device=device)
        self._but = {id(parameter): parameter for parameter in but}
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def __call__(self, module: nn.Module) -> None:
        """Fill in the module's own tensors."""
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and id(parameter) not in self._but:
                if id(parameter) not in self._made:
                    real = nn.Parameter(self._make(parameter), parameter.requires_grad)
                    real.__dict__.update(parameter.__dict__)  # what libraries note on parameters
                    self._made[id(parameter)] = parameter, real  # the first keeps the parameter, and so its id, alive
                module._parameters[name] = self._made[id(parameter)][1]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = self._make(buffer)


@torch.no_grad()
def receive(modules: Iterable[nn.Module], device: torch.device, but: Iterable[torch.Tensor] = ()) -> None:
    """Give every rank the values that the first one has, of what is not sharded yet; every rank calls it."""
    left_out = list(but)
    empty, sent, kept = Empty(device, left_out), set[int](), {id(parameter) for parameter in left_out}
    for module in modules:
        empty(module)
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in kept and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(device)
                _send(parameter.data, sent)
        for buffer in module._buffers.values():
            if buffer is not None:
                buffer.data = buffer.data.to(device)
                _send(buffer.data, sent)


@torch.no_grad()
def receive_new(parameters: Mapping[str, nn.Parameter], world: World) -> None:
    """Give every rank the first one's values of parameters that joined a prepared model; every rank calls it."""
    sent = set[int]()
    with in_step(world, "prepare: new parameters", views_in(parameters)):
        for parameter in parameters.values():
            parameter.data = parameter.data.to(world.device)
            if world.size > 1:
                _send(parameter.data, sent)


class ScatterFromRank0:
    """Sends a block's parameters from rank 0 into the shards of all ranks; every rank makes one.

    To each rank goes only what it holds, straight into its shard: a block has no memory there before it is sharded.

    Attributes:
        parameters: Those that are sent, before they are sharded.
    """

    def __init__(self, block: nn.Module, mesh: DeviceMesh, whole: Iterable[nn.Parameter]) -> None:
        kept = {id(parameter) for parameter in whole}
        self._block, self._mesh = block, mesh
        self._places: dict[int, tuple[nn.Module, str]] = {}
        self.parameters: list[nn.Parameter] = []
        for module in block.modules():
            for name, parameter in module._parameters.items():
                # A tied one is sent once.
                if parameter is None or isinstance(parameter, DTensor) or id(parameter) in kept | self._places.keys():
                    continue
                self._places[id(parameter)] = module, name
                self.parameters.append(parameter)
        size = mesh.size(mesh.ndim - 1)
        (self._holders,) = [row.tolist() for row in mesh.mesh.reshape(-1, size) if 0 in row]
        self._sent = self._send() if dist.get_rank() == 0 else []

    def _send(self) -> list[tuple[torch.Tensor, dist.Work | None]]:
        """Begin to send what the other holders get of each parameter, cut as `fully_shard` does."""
        sent = []
        for parameter in self.parameters:
            for part, holder in zip(parameter.detach().chunk(len(self._holders)), self._holders, strict=False):
                if holder != 0 and part.numel():
                    # Kept until it is sent, or its memory would be used again.
                    sent.append((part, dist.isend(part, holder)))
        return sent

    @torch.no_grad()
    def finish(self, device: torch.device) -> None:
        """Fill the shards, which `fully_shard` has cut since."""
        empty, rank = Empty(device), dist.get_rank()
        for module in self._block.modules():
            empty(module)
        local = [local_part(module._parameters[name]) for module, name in self._places.values()]  # type: ignore[arg-type]
        local = [part for part in local if part.numel()]
        if rank in self._holders[1:]:  # the first holder has the values, and other copies get theirs below
            for work in [dist.irecv(part, 0) for part in local]:
                if work is not None:
                    work.wait()
        for _, work in self._sent:
            if work is not None:
                work.wait()
        if self._mesh.ndim > 1 and self._mesh.size(0) > 1:
            for part in local:
                dist.broadcast(part, self._holders[self._mesh.get_local_rank(1)], group=self._mesh.get_group(0))


def _send(tensor: torch.Tensor, sent: set[int]) -> None:
    if tensor.numel() and tensor.data_ptr() not in sent:
        sent.add(tensor.data_ptr())  # tied tensors are sent once
        whole = tensor.contiguous()
        dist.broadcast(whole, 0)
        if whole is not tensor:
            tensor.copy_(whole)


@torch.no_grad()
def load_whole_state(model: nn.Module, state: Mapping[str, torch.Tensor], world: World, device: torch.device) -> None:
    """Give a sharded model the whole state that the first rank has, one tensor at a time; every rank calls it.

    Values take the dtype that the model has. What is on the meta device gets memory, and with it a new parameter.

    Raises:
        CheckpointMismatchError: A name is missing or unknown, or a shape differs; on every rank, and nothing changed.
    """
    own = model.state_dict(keep_vars=True)
    problems = Channel(world, "fsdp2_load_full_state_dict").broadcast(_misfits(own, state) if world.is_main else [])
    if problems:
        raise CheckpointMismatchError(
            f"A whole state does not fit the sharded {type(model).__name__}; got {', '.join(problems[:_SHOWN])}"
            f"{' …' if len(problems) > _SHOWN else ''}. Give the first rank the state of this model."
        )
    tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
    made: dict[int, torch.Tensor] = {}
    with in_step(world, "fsdp2_load_full_state_dict: values", views_in(tensors)):
        for name, value in {id(value): (name, value) for name, value in tensors.items()}.values():
            whole = torch.empty(value.shape, dtype=value.dtype, device=world.device)
            if world.is_main:
                whole.copy_(state[name])
            if world.size > 1:
                dist.broadcast(whole, 0)
            if value.is_meta:
                made[id(value)] = _made_like(value, whole, device)
            else:
                fill(value, whole)
    if made:
        given = {name: made[id(value)] for name, value in tensors.items() if id(value) in made}
        # A parameter on the meta device cannot be filled in place.
        model.load_state_dict(given, strict=False, assign=True)


def _misfits(own: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """Return what keeps a whole state from fitting a model's."""
    found = [f"no {name}" for name in own if name not in state]
    found += [f"the unknown {name}" for name in state if name not in own]
    for name, value in own.items():
        if name in state and isinstance(value, torch.Tensor) and tuple(state[name].shape) != tuple(value.shape):
            found.append(f"{name} of shape {tuple(state[name].shape)} instead of {tuple(value.shape)}")
    return found


def _made_like(empty: torch.Tensor, whole: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return what takes the place of a tensor on the meta device; names that are tied get one parameter."""
    value = (spread_like(whole, empty) if isinstance(empty, DTensor) else whole).to(device)
    return nn.Parameter(value, empty.requires_grad) if isinstance(empty, nn.Parameter) else value
