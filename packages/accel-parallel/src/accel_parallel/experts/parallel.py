"""Expert parallel as a part of a strategy: experts are cut, and tokens go to the ranks that hold theirs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import WeakIdKeyDictionary

from accel_core.comm.control import in_step
from accel_core.errors import ConfigurationError, PreparationError
from accel_core.strategies.parts import Parts
from accel_parallel.averaging import reading_groups
from accel_parallel.experts.dispatch import Route, dispatch, routed, rows_of_all
from accel_parallel.experts.layers import experts_of, parameter_names
from accel_parallel.sharding.guards import refuse_copies
from accel_parallel.sharding.loading import receive, refuse_empty, starts_from_main, views_of
from accel_parallel.sharding.replaced import keeping_marks

__all__ = ["ExpertParallel", "spread_experts"]

_BALANCE = "load_balancing_loss_func"
"""How models of transformers call the loss by which routers learn to use all experts alike."""


class ExpertParallel:
    """Gives each rank of the axis "ep" a run of the experts of every mixture, and sends it the tokens for them.

    Ranks along the axis read different data. What an expert learns from all of their tokens comes together on the rank
    that holds it; divided by the number of ranks, it is the mean that other gradients are.
    """

    def __init__(self, parts: Parts, cast: torch.dtype | None = None) -> None:
        self._world = parts.world
        self._cast = cast
        self._readers = reading_groups(parts)
        self.mesh: DeviceMesh = parts.mesh["ep"]  # type: ignore[index]
        self.size = self.mesh.size()
        self._from_main: MutableMapping[nn.Module, bool] = WeakIdKeyDictionary()
        if parts.precision.name == "fp8":
            raise ConfigurationError(
                "Layers in fp8 do not take the parts that expert parallel makes of weights; got mixed_precision='fp8'. "
                "Use mixed_precision='bf16', 'fp16' or 'no'."
            )

    @classmethod
    def of(cls, parts: Parts, cast: torch.dtype | None = None) -> ExpertParallel | None:
        """Return what shares out experts; `None` where the mesh has no axis for them."""
        return cls(parts, cast) if parts.layout.size("ep") > 1 else None

    def check(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of the parameters of a bare model's experts.

        Raises:
            PreparationError: It has none, or they cannot be shared out.
        """
        return () if model in self._from_main else parameter_names(model, experts_of(model, self.size))

    def split(self, model: nn.Module, *, from_main: bool = False) -> bool:
        """Cut the experts of a bare model in place, once; every rank calls it.

        Returns:
            Whether all ranks start from what the first one has, also of what is not cut here.
        """
        if model in self._from_main:
            return self._from_main[model]
        found = experts_of(model, self.size)
        refuse_empty(model, self._world)
        self._from_main[model] = from_main = starts_from_main(model, self._world, asked=from_main)
        with in_step(self._world, "prepare: expert parallel", views_of(model)), keeping_marks(model):
            for module in found.values():
                if from_main:
                    receive([module], self._world.device)
                spread_experts(module, self.mesh, self._world.device, cast=self._cast)
        _balance_over(model, self._readers)
        refuse_copies(model)  # a copy's forward passes would compute with the experts of this one
        return from_main


def cut(parameter: nn.Parameter, mesh: DeviceMesh, device: torch.device) -> nn.Parameter:
    """Return a parameter of which this rank holds its experts' part, in memory of its own."""
    part = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()]
    held = torch.empty_like(part, device=device, memory_format=torch.contiguous_format).copy_(part)
    return nn.Parameter(DTensor.from_local(held, mesh, [Shard(0)], run_check=False), parameter.requires_grad)


def spread_experts(
    module: nn.Module,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    cast: torch.dtype | None = None,
    route: Callable[..., Route] = routed,
) -> None:
    """Cut experts in place, and let their forward pass send each token to those who hold its experts."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = cut(parameter, mesh, device)
    forward: Callable[..., torch.Tensor] = module.forward
    group, ranks = mesh.get_group(), mesh.size()

    @functools.wraps(forward)
    def sending(tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        parts = {name: _part(each, ranks, cast) for name, each in module._parameters.items() if each is not None}
        count: int = module.num_experts  # type: ignore[assignment]

        def compute(rows: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
            if not len(rows):
                # Experts without a token have a gradient too, of zeros: optimizers change what has one.
                return rows + sum(part.reshape(-1)[:0].sum().to(rows.dtype) for part in parts.values())
            with _standing_in(module, parts, count // ranks):
                outputs = forward(rows, held[:, None], rows.new_ones(len(rows), 1))
            if outputs.shape != rows.shape:
                raise PreparationError(
                    f"Experts return for each token a row of its width; got the shape {tuple(outputs.shape)} of "
                    f"{type(module).__name__} for {tuple(rows.shape)}. Widen or narrow tokens outside of the module."
                )
            return outputs

        return dispatch(tokens, numbers, weights, experts=count, group=group, compute=compute, route=route)

    # How many tokens come differs from step to step, and is read on the CPU.
    module.forward = torch.compiler.disable(sending)  # type: ignore[no-untyped-call]


def _part(parameter: torch.Tensor, ranks: int, cast: torch.dtype | None) -> torch.Tensor:
    """Return what this rank holds of a parameter, whose gradient is a mean over ranks."""
    part: torch.Tensor = parameter.to_local()  # type: ignore[attr-defined]
    if part.requires_grad:
        part.register_hook(lambda gradient: gradient / ranks)  # type: ignore[no-untyped-call]
    return part if cast is None else part.to(cast)


@contextmanager
def _standing_in(module: nn.Module, parts: dict[str, torch.Tensor], count: int) -> Iterator[None]:
    """Let a module compute with so many experts, whose parameters are plain tensors."""
    parameters: dict[str, Any] = module._parameters
    before, all_of_them = parameters.copy(), module.num_experts
    parameters.update(parts)
    module.num_experts = count  # type: ignore[assignment]
    try:
        yield
    finally:
        parameters.update(before)
        module.num_experts = all_of_them


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
