"""Expert parallel as a part of a strategy: experts are cut, and tokens go to the ranks that hold theirs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.weak import WeakIdKeyDictionary

from accel_core.comm.control import in_step
from accel_core.errors import ConfigurationError, PreparationError
from accel_core.modules.experts import inputs_by_place, number_of_experts
from accel_core.strategies.parts import Parts
from accel_parallel.averaging import reading_groups
from accel_parallel.experts.dispatch import Route, dispatch, routed, rows_of_all
from accel_parallel.experts.layers import experts_of, listed, parameter_names
from accel_parallel.sharding.loading import receive, refuse_empty, starts_from_main, views_of
from accel_parallel.sharding.param_attrs import keeping_marks
from accel_parallel.sharding.refusals import refuse_copies, refuse_gloo

_BALANCE = "load_balancing_loss_func"
"""How models of transformers call the loss by which routers learn to use all experts alike."""


class ExpertParallel:
    """Gives each rank of the axis "ep" a run of the experts of every mixture, and sends it the tokens for them.

    Ranks along the axis read different data. What an expert learns from all of their tokens comes together on the rank
    that holds it; divided by the number of ranks, it is the mean that other gradients are.
    """

    def __init__(self, parts: Parts) -> None:
        refuse_gloo(parts.world)
        self._world = parts.world
        self.cast: torch.dtype | None = None  # in which experts compute, where it is not their own
        self._readers = reading_groups(parts)
        self.mesh: DeviceMesh = parts.mesh["ep"]  # type: ignore[index]
        self.size = self.mesh.size()
        self._from_main: MutableMapping[nn.Module, bool] = WeakIdKeyDictionary()
        if parts.precision.name == "fp8":
            raise ConfigurationError(
                "Layers in fp8 do not take the parts that expert parallel makes of weights; got mixed_precision='fp8'. "
                "Use mixed_precision='bf16', 'fp16' or 'no'."
            )

    def check(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of the parameters of a bare model's experts."""
        return () if model in self._from_main else parameter_names(model, experts_of(model, self.size))

    def split(self, model: nn.Module, *, from_main: bool = False) -> bool:
        """Cut the experts of a bare model in place, once, and return whether all of it starts from the first rank's.

        Every rank calls it.
        """
        if model in self._from_main:
            return self._from_main[model]
        found = experts_of(model, self.size)
        refuse_empty(model, self._world)
        self._from_main[model] = from_main = starts_from_main(model, self._world, asked=from_main)
        with in_step(self._world, "prepare: expert parallel", views_of(model)), keeping_marks(model):
            for module in found.values():
                if from_main:
                    receive(module.modules(), self._world.device)
                spread_experts(module, self.mesh, self._world.device, cast=self.cast)
        _balance_over(model, self._readers)
        refuse_copies(model)  # a copy's forward passes would compute with the experts of this one
        return from_main


class Holder(DeviceMesh):
    """The mesh of the one rank that holds an expert."""

    _groups: ClassVar[dict[str, dist.ProcessGroup]] = {}

    def __init__(self, mesh: DeviceMesh, place: int) -> None:
        # torch takes meshes of the same ranks and names for one, and goes on with the one that it saw first.
        name = f"holder among {mesh.mesh.tolist()}"
        self._groups[name] = mesh.get_group()
        # Nothing is exchanged on a mesh of one rank, so the others need not take part in making it.
        super().__init__(mesh.device_type, [int(mesh.mesh[place])], mesh_dim_names=(name,), _init_backend=False)

    @property
    def among(self) -> dist.ProcessGroup:
        """The ranks that share out the experts."""
        (name,) = self.mesh_dim_names or ()
        return self._groups[name]


def cut(parameter: nn.Parameter, mesh: DeviceMesh, device: torch.device) -> nn.Parameter:
    """Return a parameter of which this rank holds its experts' part, in memory of its own."""
    part = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()]
    held = torch.empty_like(part, device=device, memory_format=torch.contiguous_format).copy_(part)
    return nn.Parameter(DTensor.from_local(held, mesh, [Shard(0)], run_check=False), parameter.requires_grad)


def held_by(parameter: nn.Parameter, holder: DeviceMesh, device: torch.device) -> nn.Parameter:
    """Return a parameter of one expert, of which ranks that do not hold it have the shape alone."""
    whole = parameter.detach() if holder.get_coordinate() is not None else parameter.detach().reshape(-1)[:0]
    held = torch.empty_like(whole, device=device, memory_format=torch.contiguous_format).copy_(whole)
    shape: Any = {"shape": parameter.shape, "stride": torch.empty(parameter.shape, device="meta").stride()}
    return nn.Parameter(
        DTensor.from_local(held, holder, [Replicate()], run_check=False, **shape), parameter.requires_grad
    )


def spread_experts(
    module: nn.Module,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    cast: torch.dtype | None = None,
    route: Callable[..., Route] = routed,
) -> None:
    """Cut experts in place, and let their forward pass send each token to those who hold its experts."""
    group, ranks, experts = mesh.get_group(), mesh.size(), listed(module)
    count = number_of_experts(module)
    here = count // ranks
    own = experts[mesh.get_local_rank() * here :][:here]
    for number, expert in enumerate(experts):
        make = functools.partial(held_by, holder=Holder(mesh, number // here), device=device)
        for part in expert.modules():
            _replace(part, make)
    if not experts:
        _replace(module, functools.partial(cut, mesh=mesh, device=device))
    # What it computes with here: parameters of its own, or those of the experts in its list that this rank holds.
    places = [part._parameters for part in ([each for expert in own for each in expert.modules()] or [module])]
    forward: Callable[..., torch.Tensor] = module.forward

    @functools.wraps(forward)
    def sending(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        tokens, numbers, weights = inputs_by_place(forward, args, kwargs)
        parts = [{name: _part(each, ranks, cast) for name, each in of.items() if each is not None} for of in places]

        def compute(rows: torch.Tensor, held: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
            if not len(rows) and not own:
                # Experts without a token have a gradient too, of zeros: optimizers change what has one.
                return _following(rows, [factors, *parts[0].values()])
            with _substituted(module, here, own), _with_parts(places, parts):
                outputs = forward(rows, held[:, None], factors[:, None])
            return _checked(module, outputs, rows, factors, listed=bool(own))

        return dispatch(tokens, numbers, weights, experts=count, group=group, compute=compute, route=route)

    # How many tokens come differs from step to step, and is read on the CPU.
    module.forward = torch.compiler.disable(sending)  # type: ignore[no-untyped-call]


def _checked(
    module: nn.Module, outputs: torch.Tensor, rows: torch.Tensor, factors: torch.Tensor, *, listed: bool
) -> torch.Tensor:
    """Return what experts made of rows, through which a backward pass comes in any case; refuse other widths."""
    if outputs.shape != rows.shape:
        raise PreparationError(
            f"Experts return for each token a row of its width; got the shape {tuple(outputs.shape)} of "
            f"{type(module).__name__} for {tuple(rows.shape)}. Widen or narrow tokens outside of the module."
        )
    if outputs.requires_grad or not listed:
        return outputs
    # No expert of the list was used here: the backward pass has to come all the same, as other ranks wait.
    outputs = _following(outputs, [rows, factors])
    trains = torch.is_grad_enabled() and any(each.requires_grad for each in module.parameters())
    return outputs.requires_grad_() if trains and not outputs.requires_grad else outputs


def _replace(module: nn.Module, made: Callable[[nn.Parameter], nn.Parameter]) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = made(parameter)


def _following(outputs: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return outputs whose backward pass comes to these tensors too, with zeros."""
    return outputs + sum(each.reshape(-1)[:0].sum().to(outputs.dtype) for each in tensors)


def _part(parameter: torch.Tensor, ranks: int, cast: torch.dtype | None) -> torch.Tensor:
    """Return what this rank holds of a parameter, whose gradient is a mean over ranks."""
    part: torch.Tensor = parameter.to_local()  # type: ignore[attr-defined]
    if part.requires_grad:
        part.register_hook(lambda gradient: gradient / ranks)  # type: ignore[no-untyped-call]
    return part if cast is None else part.to(cast)


@contextmanager
def _substituted(module: nn.Module, count: int, own: Sequence[nn.Module]) -> Iterator[None]:
    """Let a module compute with so many experts, those of a list numbered anew."""
    before = module.num_experts, module._modules
    module.num_experts = count  # type: ignore[assignment]
    module._modules = {str(number): expert for number, expert in enumerate(own)} or module._modules
    try:
        yield
    finally:
        module.num_experts, module._modules = before


@contextmanager
def _with_parts(places: Sequence[dict[str, Any]], parts: Sequence[dict[str, torch.Tensor]]) -> Iterator[None]:
    """Let modules compute with plain tensors in place of parameters."""
    before = [of.copy() for of in places]
    for of, local in zip(places, parts, strict=True):
        of.update(local)
    try:
        yield
    finally:
        for of, held in zip(places, before, strict=True):
            of.update(held)


def _balance_over(model: nn.Module, groups: Sequence[dist.ProcessGroup]) -> None:
    """Let a model of transformers balance its experts over the tokens of all ranks."""
    for module in model.modules():
        for kind in type(module).__mro__ if hasattr(module, "router_aux_loss_coef") else ():
            scope = vars(sys.modules[kind.__module__])
            if _BALANCE in scope:
                module.forward = _balancing(module.forward, scope, groups)
                break


def _balancing(
    forward: Callable[..., Any], scope: dict[str, Any], groups: Sequence[dist.ProcessGroup]
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def balancing(*args: Any, **kwargs: Any) -> Any:
        own = scope[_BALANCE]

        def of_all(
            logits: Any, experts: int | None = None, top_k: int = 2, attention_mask: torch.Tensor | None = None
        ) -> Any:
            if isinstance(logits, tuple):
                logits = tuple(rows_of_all(each, groups) for each in logits)
            if attention_mask is not None:
                attention_mask = rows_of_all(attention_mask.reshape(-1), groups)[None]
            return own(logits, experts, top_k, attention_mask)

        scope[_BALANCE] = of_all
        try:
            return forward(*args, **kwargs)
        finally:
            scope[_BALANCE] = own

    return balancing
