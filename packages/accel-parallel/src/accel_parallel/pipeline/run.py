"""A model of which each rank runs its stages, on one micro-batch after the other."""

from __future__ import annotations

import inspect
import logging
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed import pipelining
from torch.utils._pytree import tree_leaves

from accel_core._records import record
from accel_core._torch import foreach_mul_
from accel_core.errors import AccelError, DataError, PreparationError, RemoteRankError, StateError
from accel_core.mesh.tensor import local_part
from accel_core.modules.unwrap import canonical_name
from accel_parallel.pipeline.batches import Call, Losses, divide, joined, loss_in, shapes, weights
from accel_parallel.pipeline.flow import Flow, Leaf, Source, stage_in, trace
from accel_parallel.pipeline.kwargs import SCHEDULES, PipelineKwargs
from accel_parallel.pipeline.stages import SPLIT_BACKWARD, Stages
from accel_parallel.sharding.wrapping import repeated_blocks

__all__ = ["Pipeline"]

_logger = logging.getLogger(__name__)
_FLOWS = 64
"""Shapes of batches whose flow is remembered."""


class _Reached(BaseException):
    """Ends a forward pass where the first block of the next stage is called; no `except Exception` may hold it up."""


class Pipeline:
    """Runs a model's own forward pass on each stage, with other stages' blocks left out.

    Blocks of earlier stages return what was received; the first block of the next stage ends the pass. Parameters
    outside of blocks are held by every stage that computes with them.
    """

    def __init__(
        self, model: nn.Module, stages: Stages, settings: PipelineKwargs, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.model, self.stages, self.settings, self.group, self.device = model, stages, settings, group, device
        self.rank = dist.get_rank(group)
        self.own = stages.of_rank(self.rank)
        self.blocks = {name: block for name, block in repeated_blocks(model).items() if name in stages.blocks}
        self.parts = stages.parts
        self.calls = stage_in([*self.blocks.values()])
        self._spans = [stages.span(stage) for stage in self.own]
        held = {number for span in self._spans for number in range(*span)}
        self.foreign = [block for number, block in enumerate(self.blocks.values()) if number not in held]
        self.elsewhere: set[int] = set()  # ids of the parameters and buffers that other ranks hold
        self._glue: dict[str, tuple[int, ...]] | None = None  # who holds what is outside of blocks, once it is decided
        self._shared: dict[int, tuple[int, ...]] = {}  # the same by id, of what several hold
        self._sources: dict[int, int] | None = None  # by id, the place of the rank that gives others a tensor
        self._flows: dict[Hashable, Flow] = {}
        self._schedule: tuple[Any, Any] | None = None
        self._signature = inspect.signature(model.forward)
        self.stage_type: type[pipelining.PipelineStage] = pipelining.PipelineStage
        self.shows_whole = False  # whether state dicts have what other ranks hold
        self.step: _Step | None = None

    def let_go(self, block: nn.Module) -> None:
        """Free the memory of another rank's block."""
        self._forget([*block.parameters(), *block.buffers()])

    def start(self) -> None:
        """Run the pipeline where the model is called, from now on."""
        stage_in([self.model]).append(self._called)

    def source(self, tensor: torch.Tensor) -> int | None:
        """Return the rank that gives others a parameter or buffer; none for one that is no part of the model."""
        if self._sources is None:
            ranks = {id(block): self._rank_of(number) for number, block in enumerate(self.blocks.values())}
            owners = {
                id(own): ranks[id(block)]
                for block in self.blocks.values()
                for own in (*block.parameters(), *block.buffers())
            }
            glue = {id(each): min((self._glue or {}).get(name, (0,))) for name, each in self._named().items()}
            self._sources = {id(each): 0 for each in self.model.buffers()} | glue | owners
        place = self._sources.get(id(tensor))
        return None if place is None else self.global_rank(place)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of the model by all of their names."""
        model = self.model
        every = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        return {name: tensor for named in every for name, tensor in named}

    def whole_state(self) -> dict[str, Any]:
        """Return the model's state dict with all names; what other ranks hold has no values."""
        self.shows_whole = True
        try:
            return self.model.state_dict()
        finally:
            self.shows_whole = False

    def _rank_of(self, block: int) -> int:
        stage = sum(start <= block for start in self.stages.starts) - 1
        return self.stages.ranks[stage]

    def global_rank(self, place: int) -> int:
        """Return the rank of the run at a place along the axis."""
        return dist.get_global_rank(self.group, place)

    def _forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Free the memory of parameters or buffers, which keep their identity, shape and format."""
        for tensor in tensors:
            tensor.data = torch.zeros((), dtype=tensor.dtype, device=self.device).expand(tensor.shape)
            tensor.grad = None
            self.elsewhere.add(id(tensor))

    def _called(self, number: int, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a batch through all stages; every rank of the pipeline calls it."""
        if self.step is not None:  # a stage's own pass
            return plain(*args, **kwargs)
        training = torch.is_grad_enabled() and self.model.training
        step: _Step | None = None
        failure: AccelError | None = None
        try:
            step = self.planned(plain, (args, kwargs), training)
        except AccelError as error:
            failure = error
        self._agree("" if step is None else repr((training, step.key)), failure)
        assert step is not None
        self.step = step
        try:
            return self._train(step) if training else self._evaluate(step)
        finally:
            self.step = None

    def planned(self, plain: Callable[..., Any], batch: Call, training: bool) -> _Step:
        """Return what a batch needs, changing nothing.

        Raises:
            DataError: It cannot be divided into micro-batches.
            PreparationError: The model cannot be cut, or returns no loss.
        """
        parts, counts = divide(batch, self.parts, equal=training)
        by_name = [{**self._signature.bind_partial(*args).arguments, **kwargs} for args, kwargs in parts]
        kinds = {each.name: each.kind for each in self._signature.parameters.values()}
        # What forward does not take is for `loss_fn` alone.
        takes_all = self.settings.loss_fn is None or inspect.Parameter.VAR_KEYWORD in kinds.values()
        own = [(args, {n: each for n, each in kwargs.items() if takes_all or n in kinds}) for args, kwargs in parts]
        # Parts of as many samples compute alike.
        alike = {count: self._flow_of(each, training) for count, each in dict(zip(counts, own, strict=True)).items()}
        flows = [alike[count] for count in counts]
        loss = loss_in(flows[0].outputs[-1].filled(lambda _, leaf: leaf.placeholder(self.device)))
        if training and self.settings.loss_fn is None and loss is None:
            raise PreparationError(
                "The last stage of a pipeline computes the loss; got none from "
                f"{type(self.model).__name__}. Pass the labels to the model, or PipelineKwargs(loss_fn=…)."
            )
        key = training, tuple(counts), shapes(batch)
        return _Step(key, plain, own, by_name, flows, weights(self.model, by_name, counts), counts)

    def _flow_of(self, batch: Call, training: bool) -> Flow:
        key = training, torch.is_autocast_enabled(self.device.type), shapes(batch)
        if key not in self._flows:
            if len(self._flows) >= _FLOWS:
                self._flows.pop(next(iter(self._flows)))
            with torch.set_grad_enabled(training):
                self._flows[key] = trace(self.model, self.model.forward, self.blocks, self.calls, batch, self.device)
        needed = frozenset[Source]().union(*(self._flows[key].needed(*span) for span in self._spans))
        lost = [name for name, holders in (self._glue or {}).items() if self.rank not in holders and name in needed]
        if lost:
            raise PreparationError(
                "Each stage of a pipeline computes with the parameters that it needed for the first batch; got "
                f"{', '.join(lost)} for a later one. Let all batches run the same layers."
            )
        return self._flows[key]

    def _agree(self, key: str, failure: AccelError | None) -> None:
        """Go on only if all ranks of the pipeline have the same to do, and none of them failed."""
        own = torch.tensor([zlib.crc32(key.encode()), failure is not None], dtype=torch.int64, device=self.device)
        everybody = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(everybody, own, group=self.group)
        found = [(int(each[0]), bool(each[1])) for each in everybody]
        if failure is not None:
            raise failure
        failed = [self.global_rank(place) for place, (_, wrong) in enumerate(found) if wrong]
        if failed:
            raise RemoteRankError(
                f"A pipeline runs on all of its ranks; got an error on rank {failed[0]}, named there."
            )
        if len(set(found)) > 1:
            raise DataError(
                "Ranks of one pipeline compute on the same batches, in training or not; got others on "
                f"{self.model.__class__.__name__}. Read them from a prepared DataLoader."
            )

    def _train(self, step: _Step) -> object:
        """Compute the loss of a batch and the gradients, which `backward` adds to those that are there."""
        if self._glue is None:
            self.keep_glue(step.flows[0])
        held = [each for each in self.model.parameters() if each.requires_grad and id(each) not in self.elsewhere]
        before = [(parameter, parameter.grad) for parameter in held]
        for parameter in held:
            parameter.grad = None
        try:
            if self._schedule is None or self._schedule[0] != step.key:
                self._schedule = step.key, self.scheduled(step)
            places = torch.arange(self.parts)
            self._schedule[1].step(index=places, target=places, return_outputs=False)
            self.add_shared()
            found = [(each, each.grad) for each in held if each.grad is not None]
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient
        total = torch.zeros((), device=self.device)
        for loss in step.losses:
            total += loss
        last = self.stages.ranks[-1]
        dist.broadcast(total, self.global_rank(last), group=self.group)
        loss = _Add.apply(torch.zeros((), device=self.device, requires_grad=True), total, found)  # type: ignore[no-untyped-call]
        plain = self.settings.loss_fn is None and step.flows[0].outputs[-1].structure.is_leaf()
        return loss if plain else Losses(loss=loss)

    def keep_glue(self, flow: Flow) -> None:
        """Free the memory of what is outside of blocks and not needed by the stages here."""
        ranks: dict[Source, set[int]] = {}
        for stage, rank in enumerate(self.stages.ranks):
            for source in flow.needed(*self.stages.span(stage)):
                ranks.setdefault(source, set()).add(rank)
        inside = {id(parameter) for block in self.blocks.values() for parameter in block.parameters()}
        named = {name: each for name, each in self._named().items() if id(each) not in inside}
        self._sources = None
        for stage in range(1, self.stages.count):
            start = self.stages.starts[stage]
            leaves = ", ".join(f"{self.stages.blocks[b]}[{place}]" for b, place in flow.crossing(start))
            _logger.info("Stage %d begins with %s, and receives %s.", stage, self.stages.blocks[start], leaves)
        # What nothing needs stays on the first rank, which saves it.
        self._glue = {name: tuple(sorted(ranks.get(name, {0}))) for name in named}
        self._forget(named[name] for name, holders in self._glue.items() if self.rank not in holders)
        self._shared = {id(named[name]): holders for name, holders in self._glue.items() if len(holders) > 1}

    def _named(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the model by one name each."""
        return {canonical_name(name): parameter for name, parameter in self.model.named_parameters()}

    def counted(self, parameter: torch.Tensor) -> bool:
        """Return whether a norm over all stages counts a parameter here: of several holders, the first does."""
        return id(parameter) not in self.elsewhere and self.rank == min(self._shared.get(id(parameter), [self.rank]))

    def add_shared(self) -> None:
        """Add up the gradients of parameters that several stages hold: everywhere in one order, so they stay equal."""
        moves: list[dist.P2POp] = []
        sums: list[tuple[nn.Parameter, dict[int, torch.Tensor]]] = []
        for parameter in self.model.parameters():
            holders = self._shared.get(id(parameter), ())
            if self.rank not in holders or not parameter.requires_grad:
                continue
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            parts = {place: own if place == self.rank else torch.empty_like(own) for place in holders}
            for place, part in parts.items():
                if place != self.rank:
                    peer = self.global_rank(place)
                    moves += [
                        dist.P2POp(dist.isend, own, peer, self.group),
                        dist.P2POp(dist.irecv, part, peer, self.group),
                    ]
            sums.append((parameter, parts))
        for work in dist.batch_isend_irecv(moves) if moves else ():
            work.wait()
        for parameter, parts in sums:
            total = torch.zeros_like(parts[self.rank])
            for place in sorted(parts):
                total += parts[place]
            parameter.grad = total

    def scheduled(self, step: _Step) -> Any:
        """Return torch's schedule for batches of the shapes of this one."""
        flow, made = step.flows[0], []
        split = self.settings.schedule in SPLIT_BACKWARD
        for stage, span in zip(self.own, self._spans, strict=True):
            module = _StageModule(self, stage, self._trained(flow, span))
            last = stage == self.stages.count - 1
            crossing = flow.crossing(span[0]) if stage else ()
            inputs = tuple(_like(flow.leaf(source)) for source in crossing)
            leaving = [Leaf((), torch.float32, True)] if last else [flow.leaf(each) for each in flow.crossing(span[1])]
            outputs = tuple(_like(leaf) for leaf in leaving)
            # torch computes gradients of weights apart where a chain of layers leads from one input to one output.
            chain = len(crossing) == 1 and not any(isinstance(each, str) for each in flow.needed_inside(*span))
            together = None if chain else lambda: lambda: None
            made.append(
                self.stage_type(
                    module,
                    stage,
                    self.stages.count,
                    self.device,
                    inputs,
                    outputs,
                    group=self.group,
                    dw_builder=together if split and stage else None,
                )
            )
        kind = getattr(pipelining, SCHEDULES[self.settings.schedule])
        several = self.stages.count > self.group.size()
        return kind(made if several else made[0], self.parts, loss_fn=lambda loss, _: loss, scale_grads=False)

    def _trained(self, flow: Flow, span: tuple[int, int]) -> list[nn.Parameter]:
        needed = flow.needed(*span)
        own = [parameter for name, parameter in self._named().items() if name in needed]
        own += [each for block in [*self.blocks.values()][slice(*span)] for each in block.parameters()]
        return [each for each in {id(each): each for each in own}.values() if each.requires_grad]

    def pass_through(self, step: _Step, stage: int, part: int, received: Sequence[torch.Tensor]) -> Any:
        """Run one stage on one micro-batch.

        Returns:
            What crosses the cut behind it; of the last stage, what the model returns.
        """
        span, flow = self.stages.span(stage), step.flows[part]
        found = dict(zip(flow.crossing(span[0]) if stage else (), received, strict=True))
        running = _Running(flow, span, found, self.device, self.stages.blocks)
        self.calls.append(running.call)
        args, kwargs = step.parts[part]
        try:
            result = step.plain(*args, **kwargs)
        except _Reached:
            return tuple(running.values[source].contiguous() for source in flow.crossing(span[1]))
        finally:
            self.calls.remove(running.call)
        running.check_end(span[1])
        return result

    def loss_of(self, step: _Step, part: int, result: object) -> torch.Tensor:
        """Return what a micro-batch adds to the loss of its batch.

        Raises:
            PreparationError: There is no loss.
        """
        loss_fn = self.settings.loss_fn
        loss = loss_in(result if loss_fn is None else loss_fn(result, step.named[part]))
        if loss is None:
            raise PreparationError(
                "loss_fn of PipelineKwargs returns the mean loss of a micro-batch as a scalar tensor; got something "
                f"else from {loss_fn}. Return such a tensor."
            )
        share = loss.reshape(()).float() * step.shares[part]
        step.losses.append(share.detach())
        return share

    def _evaluate(self, step: _Step) -> object:
        """Return on every rank what the model returns for a batch, without gradients."""
        results: list[Any] = []
        arrived: dict[tuple[int, int], Sequence[torch.Tensor]] = {}
        sent: list[tuple[Any, torch.Tensor]] = []
        count = len(step.parts)
        with torch.no_grad():
            # In each turn, stages compute on different micro-batches, and send before the next turn receives.
            for turn in range(count + self.stages.count - 1):
                for stage in self.own:
                    part = turn - stage
                    if not 0 <= part < count:
                        continue
                    received = arrived.pop((stage, part), ())
                    if stage and self.stages.ranks[stage - 1] != self.rank:
                        received = self._receive(step.flows[part], stage)
                    result = self.pass_through(step, stage, part, received)
                    if stage == self.stages.count - 1:
                        results.append(result)
                    elif self.stages.ranks[stage + 1] == self.rank:
                        arrived[stage + 1, part] = result
                    else:
                        peer = self.global_rank(self.stages.ranks[stage + 1])
                        sent += [(dist.isend(tensor, peer, group=self.group), tensor) for tensor in result]
            for work, _ in sent:
                work.wait()
            return self._shared_out(step, results)

    def _receive(self, flow: Flow, stage: int) -> list[torch.Tensor]:
        peer = self.global_rank(self.stages.ranks[stage - 1])
        tensors = [flow.leaf(source).empty(self.device) for source in flow.crossing(self.stages.span(stage)[0])]
        for tensor in tensors:
            dist.recv(tensor, peer, group=self.group)
        return tensors

    def _shared_out(self, step: _Step, results: list[Any]) -> object:
        """Give every rank what the last stage returned."""
        source = self.global_rank(self.stages.ranks[-1])
        everywhere: list[list[Any]] = []
        for place, flow in enumerate(step.flows):
            leaves = flow.outputs[-1].leaves
            own = tree_leaves(results[place]) if results else leaves
            tensors = [
                (each.contiguous() if results else leaf.empty(self.device)) if isinstance(leaf, Leaf) else None
                for leaf, each in zip(leaves, own, strict=True)
            ]
            for tensor in tensors:
                if tensor is not None:
                    dist.broadcast(tensor, source, group=self.group)
            everywhere.append(tensors)
        return joined(step.flows[0].outputs[-1], everywhere, step.shares, step.counts)


@record
class _Step:
    """One batch on its way."""

    key: Hashable
    plain: Callable[..., Any]
    parts: list[Call]
    named: list[dict[str, Any]]
    flows: list[Flow]
    shares: list[float]
    counts: list[int]

    def __post_init__(self) -> None:
        self.losses: list[torch.Tensor] = []


@record
class _Running:
    """One pass of a stage on a micro-batch."""

    flow: Flow
    span: tuple[int, int]
    values: dict[tuple[int, int], torch.Tensor]
    device: torch.device
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        self.next = 0

    def call(self, number: int, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a block of an earlier stage returned, run one of this stage, or end the pass."""
        if number != self.next:
            raise self._strayed(self.names[number])
        self.next += 1
        if number == self.span[1]:
            raise _Reached
        outputs = self.flow.outputs[number]
        if number < self.span[0]:
            return outputs.filled(lambda place, leaf: self._received(number, place, leaf))
        result = plain(*args, **kwargs)
        leaves = tree_leaves(result)
        if len(leaves) != len(outputs.leaves):
            raise self._strayed(self.names[number])
        for place, (leaf, value) in enumerate(zip(outputs.leaves, leaves, strict=True)):
            if isinstance(leaf, Leaf):
                if tuple(value.shape) != leaf.shape or value.dtype != leaf.dtype:
                    raise self._strayed(self.names[number])
                self.values[number, place] = value
        return result

    def _received(self, number: int, place: int, leaf: Leaf) -> torch.Tensor:
        found = self.values.get((number, place))
        return leaf.placeholder(self.device) if found is None else found

    def check_end(self, end: int) -> None:
        """Refuse a pass that left out blocks."""
        if self.next != end:
            raise self._strayed(self.names[self.next])

    def _strayed(self, name: str) -> PreparationError:
        return PreparationError(
            "The blocks of a pipeline run alike for all batches of the same shapes; got another order, or other "
            f"outputs, at {name} than in the pass without values. Remove what skips layers at random or by values."
        )


class _StageModule(nn.Module):
    """What torch's schedules call: a stage, with the number of the micro-batch as an argument."""

    def __init__(self, pipeline: Pipeline, stage: int, trained: list[nn.Parameter]) -> None:
        super().__init__()
        self._run = pipeline, stage, trained
        self.blocks = tuple(pipeline.blocks.values())[slice(*pipeline.stages.span(stage))]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters that this stage trains; the model itself is no part of this module."""
        return iter(self._run[2])

    def forward(self, *received: torch.Tensor, index: torch.Tensor) -> object:
        """Return what crosses the next cut, or what the micro-batch adds to the loss."""
        pipeline, stage, _ = self._run
        step, part = pipeline.step, int(index)
        if step is None:
            raise StateError(
                "A stage runs inside of a step of its pipeline; got a call from elsewhere. Call the model."
            )
        split = pipeline.settings.schedule in SPLIT_BACKWARD
        own = [_Leaving.apply(each) if split else each for each in received]  # type: ignore[no-untyped-call]
        result = pipeline.pass_through(step, stage, part, own)
        if stage == pipeline.stages.count - 1:
            return pipeline.loss_of(step, part, result)
        # Schedules that compute gradients of inputs and of weights apart detach what a stage returns: no view.
        return tuple(each.clone() for each in result) if split else result


class _Leaving(torch.autograd.Function):
    """The identity, whose gradient lies in memory as it is sent."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


class _Add(torch.autograd.Function):
    """The loss of a batch, whose gradients are there already: the backward pass adds them where gradients add up."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, found: list[Any]) -> torch.Tensor:
        ctx.found = found
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        found, ctx.found = ctx.found, None
        if found is None:
            raise StateError(
                "The gradients of a batch in a pipeline are added once; got a second backward pass of its loss. Add "
                "losses up before backward."
            )
        own = [local_part(each) for _, each in found]
        if own and not (gradient.device.type == "cpu" and gradient.item() == 1):
            foreach_mul_(own, gradient.to(own[0].device))
        for parameter, new in found:
            parameter.grad = new if parameter.grad is None else parameter.grad.add_(new)
        return None, None, None


def _like(leaf: Leaf) -> torch.Tensor:
    """Return what tells torch the shape and format of what crosses a cut."""
    return leaf.empty("meta").requires_grad_(leaf.requires_grad)
