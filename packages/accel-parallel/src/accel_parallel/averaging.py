"""Gradients that each rank computes for itself, averaged where a window ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from accel_core.errors import PreparationError, StateError
from accel_core.mesh.layout import GROUPS
from accel_core.mesh.tensor import is_spread, local_part
from accel_core.optim.rebind import ParameterNames
from accel_core.strategies.parts import Parts

_BUCKET = 25 * 2**20
"""Bytes of gradients that are averaged together."""


_news: MutableMapping[torch.nn.Module, SimpleNamespace] = WeakIdKeyDictionary()
"""What is new of a model: whether it has gradients that are `unaveraged`."""


def reading_groups(parts: Parts) -> list[dist.ProcessGroup]:
    """Return the groups along the mesh axes whose ranks see different samples, or different tokens of a sample."""
    if parts.mesh is None:
        return []
    return [parts.mesh.get_group(axis) for axis in GROUPS["dp_cp"] if parts.layout.size(axis) > 1]


class Averaging:
    """Averages the gradients of parameters that several ranks hold in common, model by model.

    Averaging twice changes nothing: averaged gradients are equal on all ranks.
    """

    def __init__(self, device: torch.device, groups: Sequence[dist.ProcessGroup]) -> None:
        self._device = device
        self._groups = tuple(group for group in groups if group.size() > 1)
        self._parameters: MutableMapping[torch.nn.Module, list[torch.nn.Parameter]] = WeakIdKeyDictionary()
        self._held: MutableMapping[torch.nn.Module, bool] = WeakIdKeyDictionary()

    def __contains__(self, model: torch.nn.Module) -> bool:
        """Return whether gradients of a model are averaged here."""
        return model in self._parameters

    def __bool__(self) -> bool:
        """Return whether gradients of any model are averaged here."""
        return bool(self._parameters)

    def watch(self, model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Register parameters of a model whose gradients are averaged here, beside those registered before."""
        if not parameters:
            return
        self._parameters[model] = [*self.of(model), *parameters]
        # Looked up once: a look-up in the hook of every parameter costs more than all else that a step does here.
        news = _news.setdefault(model, SimpleNamespace(unaveraged=False))

        def note(_: torch.Tensor) -> None:
            news.unaveraged = True

        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def lacks(self, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of a model that every rank holds whole and that are not averaged here, by name."""
        known = {id(parameter) for parameter in self.of(model)}
        return {
            name: parameter
            for name, parameter in model.named_parameters()
            if id(parameter) not in known and not is_spread(parameter)
        }

    def of(self, model: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Return the parameters of a model whose gradients are averaged here."""
        return list(self._parameters.get(model, ()))

    def holds(self, parameter: torch.Tensor) -> bool:
        """Return whether the gradient of a parameter is averaged here."""
        return any(parameter is own for parameters in self._parameters.values() for own in parameters)

    def is_held(self, model: torch.nn.Module) -> bool:
        """Return whether gradients of a model are not averaged at present."""
        return self._held.get(model, False)

    @contextmanager
    def holding(self, model: torch.nn.Module, held: bool) -> Iterator[None]:
        """Set whether the gradients of a model are held back in the block, or averaged."""
        before = self.is_held(model)
        self._held[model] = held
        try:
            yield
        finally:
            self._held[model] = before

    def complete(self) -> None:
        """Average the gradients of all models that are not held back; every rank calls it."""
        for model, parameters in list(self._parameters.items()):
            if not self.is_held(model):
                self._average([parameter for parameter in parameters if parameter.requires_grad])
                _news[model].unaveraged = False

    @torch.no_grad()
    def reduce_partial(self) -> None:
        """Sum up new gradients that ranks hold as partial sums; `complete` does so too."""
        for model, parameters in list(self._parameters.items()):
            if _news[model].unaveraged:
                _reduce_partial(parameters)

    def refuse_unaveraged(self) -> None:
        """Refuse a step with gradients that were not averaged."""
        if self._groups and any(_news[model].unaveraged for model in self._parameters):
            raise StateError(
                "Gradients of parameters that every rank holds were not averaged over the ranks; got a step after "
                "loss.backward(). Call accelerator.backward(loss) instead."
            )

    def guard(self, optimizer: torch.optim.Optimizer, names: ParameterNames) -> None:
        """Make an optimizer's step refuse gradients that were not averaged, and parameters of no prepared model."""
        known = False

        def refuse(*_: object) -> None:
            nonlocal known
            self.refuse_unaveraged()
            strange = [] if known else names.strange(optimizer)
            if strange:
                raise PreparationError(
                    f"The optimizer {type(optimizer).__name__} holds parameters of no prepared model, whose gradients "
                    f"are not averaged; got {', '.join(strange)}. Prepare the model that they belong to."
                )
            known = True

        optimizer.register_step_pre_hook(refuse)

    @torch.no_grad()
    def _average(self, parameters: list[torch.nn.Parameter]) -> None:
        """Average gradients over ranks that hold the same; one that no rank has stays `None`."""
        _reduce_partial(parameters)
        if not parameters or not self._groups:
            return
        # Other ranks may have used other parameters. Who has all gradients knows that somebody has each, and reads
        # nothing, which would wait for the device.
        has = [float(parameter.grad is not None) for parameter in parameters]
        complete = all(has)
        there = torch.ones(len(has), device=self._device) if complete else torch.tensor(has, device=self._device)
        for group in self._groups:
            dist.all_reduce(there, group=group)
        found: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
        for parameter, ranks in zip(parameters, has if complete else there.tolist(), strict=True):
            if ranks:
                # Its ranks take part all the same.
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                # torch may know one group by two objects: a mesh that is equal to an earlier one has groups of its own.
                cut = [dist.get_process_group_ranks(group) for group in groups_of(parameter)]
                over = tuple(group for group in self._groups if dist.get_process_group_ranks(group) not in cut)
                found.setdefault(over, []).append(local_part(parameter.grad))
        for over, own in found.items():
            average(own, over)


def groups_of(parameter: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which a `DTensor` is sharded, or of which one rank holds it; none for a plain tensor."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    if (among := getattr(mesh, "among", None)) is not None:
        return (among,)
    return tuple(
        mesh.get_group(axis) for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()
    )


def average(gradients: Sequence[torch.Tensor], groups: Sequence[dist.ProcessGroup]) -> None:
    """Average gradients that every rank has over groups of ranks, one group after the other."""
    for bucket in _buckets(gradients):
        _average_together(bucket, groups)


def _average_together(gradients: list[torch.Tensor], groups: Sequence[dist.ProcessGroup]) -> None:
    """Average gradients of one format on one device in one message."""
    first = gradients[0]
    alone = len(gradients) == 1 and first.is_contiguous()
    flat = first if alone else torch.cat([gradient.reshape(-1) for gradient in gradients])
    for group in groups:
        dist.all_reduce(flat, group=group)
        flat /= group.size()
    if not alone:
        parts = torch.split(flat, [each.numel() for each in gradients])
        for gradient, mean in zip(gradients, parts, strict=True):
            gradient.copy_(mean.view_as(gradient))


def _reduce_partial(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Add up the parts of gradients that ranks of a mesh hold as summands of what their parameters hold whole."""
    for parameter in parameters:
        gradient = parameter.grad
        if is_spread(gradient) and is_spread(parameter) and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors of one format on one device together, in an order that is the same on all ranks."""
    for kind in alike(tensors):
        bucket: list[torch.Tensor] = []
        size = 0
        for tensor in kind:
            if bucket and size + tensor.nbytes > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def alike(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return tensors of one format on one device together, as operations on lists of tensors take them."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())
