"""Tensor parallel as a part of a strategy: which ranks, which plan, and the proof that their gradients agree."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from accel_core._torch import enable_async_tp, shard_groups
from accel_core.comm.control import Channel
from accel_core.errors import ConfigurationError, PreparationError, StateError
from accel_core.mesh.tensor import local_part
from accel_core.options.enums import PRECISIONS
from accel_core.process.world import World
from accel_core.strategies.parts import Parts
from accel_parallel.averaging import Averaging, reading_groups
from accel_parallel.sharding.param_attrs import keeping_marks, refuse_hooks
from accel_parallel.sharding.refusals import refuse_gloo
from accel_parallel.tensor.plan import TensorPlan, plan_of
from accel_parallel.tensor.split import check_arrived, is_split, split

_SHOWN = 8
_SUMMED = "replicated_with_grad_allreduce"


class TensorParallel:
    """Splits models over the ranks of the axis "tp", and proves once for each that these ranks train one model.

    What the plan leaves whole has a gradient on every rank, computed from the same numbers, and nobody averages it:
    a reduction that a plan lacks, other data or other dropout on some ranks would let copies drift apart. So the first
    complete gradients of each model are compared, and the loss that they come from, which batches with labels of their
    own change.
    """

    def __init__(self, parts: Parts) -> None:
        refuse_gloo(parts.world)
        self._world = parts.world
        self._ranks = parts.layout.group("tp")
        self.size = len(self._ranks)
        self.mesh: DeviceMesh = parts.mesh["tp"]  # type: ignore[index]
        self._copies = reading_groups(parts)
        handler = None if parts.parallelism is None else parts.parallelism.tp_handler
        self._plan: Mapping[str, Any] | str = "auto" if handler is None else handler.tp_plan
        self._unproved: MutableMapping[nn.Module, bool] = WeakIdKeyDictionary()
        self._summed: MutableMapping[nn.Module, list[nn.Module]] = WeakIdKeyDictionary()
        if PRECISIONS[parts.precision.name].exchanges_layers:
            raise ConfigurationError(
                "Layers that a library exchanged do not take parts of tensors, which tensor parallel makes of weights; "
                f"got mixed_precision={parts.precision.name!r}. Use mixed_precision='bf16', 'fp16' or 'no'."
            )
        if handler is not None and handler.enable_async_tp:
            _overlap(self.mesh.get_group(), self._world)

    def check(self, model: nn.Module) -> TensorPlan:
        """Return how a bare model will be split, an empty plan where it arrived split.

        Raises:
            PreparationError: It cannot be split, has hooks on parameters that would be, or arrived split over other
                ranks.
        """
        if not is_split(model):
            plan = plan_of(model, self._plan, self.size)
            modules = ((name, model.get_submodule(name)) for name, _ in plan.styles)
            refuse_hooks((f"{name}.{own}", p) for name, module in modules for own, p in module.named_parameters())
            return plan
        if not isinstance(self._plan, str):
            raise PreparationError(
                f"A model is split by one plan; got {type(model).__name__}, which arrived split, and a tp_plan. "
                "Leave the plan out, or load the model whole."
            )
        check_arrived(model, self._ranks)
        return TensorPlan()

    def split(self, model: nn.Module, plan: TensorPlan, *, from_main: bool = False) -> None:
        """Split a bare model in place; every rank calls it."""
        with keeping_marks(model):
            split(model, plan, self.mesh, self._world, self._copies, from_main=from_main)

    def watch(self, model: nn.Module, *, again: bool = False) -> None:
        """Compare the first complete gradients of a bare model, if it has something to train."""
        self._summed[model] = [*dict.fromkeys(_summed(model))]  # a model and the one in it name the same
        if (again or model not in self._unproved) and any(each.requires_grad for each in model.parameters()):
            self._unproved[model] = True  # until its first complete gradients are compared

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Let gradients of some batches add up once where a model adds up over ranks what a backward pass leaves."""
        # It would add up those of earlier batches again: these are kept apart, and shards are reduced after every
        # batch.
        models = {model: modules for model, modules in self._summed.items() if modules}
        parts = (part for model in models for part in model.modules() if isinstance(part, FSDPModule))
        groups = [(group, group.reduce_grads) for part in parts for group in shard_groups(part)]
        own = (each for modules in models.values() for module in modules for each in module.parameters(recurse=False))
        earlier = [(each, each.grad) for each in own if each.grad is not None]
        for group, _ in groups:
            group.reduce_grads = True
        for parameter, _ in earlier:
            parameter.grad = None
        try:
            yield
        finally:
            for group, before in groups:
                group.reduce_grads = before
            for parameter, gradient in earlier:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def check_replicas(self, loss: torch.Tensor, averaging: Averaging) -> None:
        """Compare what ranks of one replica hold of the same, for models whose first gradients are complete.

        Raises:
            StateError: It differs; on every rank, before anything is updated.
        """
        for model in [model for model, unproved in self._unproved.items() if unproved]:
            # Within a window they are of this rank alone.
            if averaging.is_held(model) or all(parameter.grad is None for parameter in model.parameters()):
                continue
            found, finite = self._differing(model, loss)
            everywhere = Channel(self._world, "backward: tensor parallel").exchange((found, finite))
            names = list(dict.fromkeys(name for each, _ in everywhere for name in each))
            if names:
                raise StateError(
                    "Ranks of tensor parallel compute the same loss, and the same gradients of what every one of them "
                    f"holds; got different ones of {', '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''}. "
                    "Give them the same batches and random seeds, and a plan whose modules consume and produce what "
                    "their neighbors expect."
                )
            # An overflow of fp16 shows nothing: that step is skipped.
            self._unproved[model] = not all(finite for _, finite in everywhere)

    @torch.no_grad()
    def _differing(self, model: nn.Module, loss: torch.Tensor) -> tuple[list[str], bool]:
        """Return the names of what every rank holds and has other gradients of, and whether all of these are finite.

        The loss is among them, as "the loss".
        """
        found = [("the loss", local_part(loss.detach()))]
        found += [
            (name, local_part(parameter.grad))
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and self._everyone_holds(parameter)
        ]
        high = torch.stack([each.float().norm().to(self._world.device) for _, each in found])
        low = high.clone()
        dist.all_reduce(high, dist.ReduceOp.MAX, group=self.mesh.get_group())
        dist.all_reduce(low, dist.ReduceOp.MIN, group=self.mesh.get_group())
        # A reduction that is missing changes a sum by its own size; rounding, by far less than half of its digits.
        tolerance = max(torch.finfo(each.dtype).eps for each in (high, *(each for _, each in found))) ** 0.5
        apart = (high - low) > tolerance * high
        finite = bool(torch.isfinite(high).all())
        return [name for (name, _), differs in zip(found, apart.tolist(), strict=True) if differs], finite

    def _everyone_holds(self, parameter: torch.Tensor) -> bool:
        """Return whether all ranks of tensor parallel hold the same of a parameter."""
        if not isinstance(parameter, DTensor):
            return True
        mesh = parameter.device_mesh
        cut = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
        return all(tuple(dist.get_process_group_ranks(mesh.get_group(axis))) != self._ranks for axis in cut)


def _summed(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of transformers that add up their gradients over ranks in a hook of their parameters."""
    for owner in model.modules():
        styles = vars(owner).get("_tp_plan") or {}
        if _SUMMED in styles.values():
            for name, module in owner.named_modules():
                if styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) == _SUMMED:
                    yield module


def _overlap(group: dist.ProcessGroup, world: World) -> None:
    """Let compiled products overlap with what travels, where torch does so; elsewhere, warn."""
    if world.device.type == "cuda":
        enable_async_tp(group)
        return
    warnings.warn(
        "Computation overlaps with communication only in models that are compiled for CUDA; got enable_async_tp=True "
        f"on {world.device.type}. Results are the same without it.",
        stacklevel=2,
    )
