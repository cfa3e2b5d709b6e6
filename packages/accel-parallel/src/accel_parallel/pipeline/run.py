"""A model of which each rank runs its stages, on one micro-batch after the other."""

from __future__ import annotations

import inspect
import logging
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import field
from functools import partial, reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from accel_core._records import record
from accel_core._torch import foreach_mul_
from accel_core.errors import DataError, PreparationError, RemoteRankError, StateError
from accel_core.mesh.tensor import local_part
from accel_core.modules import empty
from accel_core.modules.unwrap import canonical_name
from accel_parallel.pipeline.batches import Call, Losses, divide, joined, loss_in, shapes, weights
from accel_parallel.pipeline.flow import Drawn, Flow, Leaf, Source, stage_in, trace
from accel_parallel.pipeline.kwargs import SCHEDULES, PipelineKwargs
from accel_parallel.pipeline.stages import SPLIT_BACKWARD, Stages
from accel_parallel.sharding.loading import Empty
from accel_parallel.sharding.wrapping import repeated_blocks

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)
_FLOWS = 64  # shapes of batches whose flow is remembered
_TORCHS_OWN = "Failed to run stage backward"  # around an error of a backward pass


class _Reached(BaseException):
    """Ends a forward pass where the first block of the next stage is called; no handler of `Exception` holds it up."""


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
        self.calls = stage_in([*self.blocks.values()])
        held = {number for stage in self.own for number in range(*stages.span(stage))}
        self.foreign = [block for number, block in enumerate(self.blocks.values()) if number not in held]
        self.elsewhere: set[int] = set()  # ids of the parameters and buffers that other ranks hold
        self._glue: dict[str, tuple[int, ...]] | None = None  # who holds what is outside of blocks, once it is decided
        self._holders: dict[int, tuple[int, ...]] | None = None
        self._flows: dict[Hashable, Flow] = {}
        self._schedule: _Scheduled | None = None
        self._signature = inspect.signature(model.forward)
        self.scaler: torch.amp.GradScaler | None = None  # of fp16
        self.shows_whole = False  # whether state dicts have what other ranks hold
        self.stage_type: type[pipelining.PipelineStage] = Stage
        self.step: _Step | None = None

    def make(self) -> None:
        """Give a model on the meta device memory for what the stages here need, and for nothing else.

        One that was made under `empty_init` gets its values too.
        """
        has_values = empty.seed_of(self.model) is not None
        lost = [name for name, each in self.model.named_buffers() if each.is_meta and not has_values]
        if lost:
            raise PreparationError(
                f"Buffers have values that no checkpoint may have; got {', '.join(lost[:3])} on the meta device. Make "
                "the model under init_empty_weights(), which leaves them where they are."
            )
        example = getattr(self.model, "dummy_inputs", None)  # of all models of transformers
        if example is not None:
            self._decide(trace(self.model, self.model.forward, self.blocks, self.calls, ((), example), self.device))
        if has_values:
            empty.initialize(self.model, self.device, holds=lambda each: self.rank in self.holders(each))
            self._holders = None  # by id of what was there before
        own = {id(each) for each in self.model.parameters() if self.rank in self.holders(each)}

        def unknown(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
            if id(tensor) in own:
                return torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0, device=device)
            return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)

        self.model.apply(Empty(self.device, make=unknown))
        self.free(self.model)

    def free(self, module: nn.Module) -> None:
        """Free the memory of what other ranks hold; parameters and buffers keep their identity, shape and format."""
        self._holders = None  # by id of what was there before
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) not in self.elsewhere and self.rank not in self.holders(tensor):
                tensor.data = torch.zeros((), dtype=tensor.dtype, device=self.device).expand(tensor.shape)
                tensor.grad = None
                self.elsewhere.add(id(tensor))

    def start(self) -> None:
        """Run the pipeline where the model is called, from now on."""
        self._holders = None  # shards are other parameters
        stage_in([self.model]).append(self._called)

    def holders(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the places along the axis of the ranks that hold a parameter or buffer of the model, or none."""
        if self._holders is None:
            everywhere, glue = tuple(range(self.group.size())), self._glue or {}
            self._holders = {id(each): everywhere for each in self.model.buffers()}
            self._holders |= {id(each): glue.get(name, everywhere) for name, each in self._named().items()}
            for number, block in enumerate(self.blocks.values()):
                place = (self.stages.ranks[sum(start <= number for start in self.stages.starts) - 1],)
                self._holders |= {id(each): place for each in (*block.parameters(), *block.buffers())}
        return self._holders.get(id(tensor), ())

    def source(self, tensor: torch.Tensor) -> int | None:
        """Return the rank that gives others a parameter or buffer; none for one that is not a part of the model."""
        found = self.holders(tensor)
        return self._peer(min(found)) if found else None

    def counted(self, parameter: torch.Tensor) -> bool:
        """Return whether a norm over all stages counts a parameter here: of several holders, the first does."""
        return self.rank == min(self.holders(parameter), default=self.rank)

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

    def _peer(self, place: int) -> int:
        """Return the rank of the run at a place along the axis."""
        return dist.get_global_rank(self.group, place)

    def _named(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the model by one name each."""
        return {canonical_name(name): parameter for name, parameter in self.model.named_parameters()}

    def _called(self, number: int, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Run a batch through all stages; every rank of the pipeline calls it."""
        if self.step is not None:  # a stage's own pass
            return plain(*args, **kwargs)
        step: _Step | None = None
        failure: Exception | None = None
        try:
            step = self.planned(plain, (args, kwargs), torch.is_grad_enabled() and self.model.training)
        except Exception as error:
            failure = error
        key = zlib.crc32(repr(step and step.key).encode()) >> 8  # a float is exact up to 24 bits
        keys = self._meet(torch.tensor(float(key), device=self.device), failure)
        assert step is not None
        if (keys != key).any():
            raise DataError(
                "Ranks of one pipeline compute on the same batches, in training or not; got others on "
                f"{self.model.__class__.__name__}. Read them from a prepared DataLoader."
            )
        self.step = step
        try:
            return self._train(step) if step.training else self._evaluate(step)
        finally:
            self.step = None

    def planned(self, plain: Callable[..., Any], batch: Call, training: bool) -> _Step:
        """Return what a batch needs, or refuse it, changing nothing."""
        if training and any(isinstance(each, torch.Tensor) and each.requires_grad for each in tree_leaves(batch)):
            raise DataError(
                "A pipeline computes gradients of its own parameters, before backward; got an input of "
                f"{type(self.model).__name__} that requires a gradient. Pass input.detach(), or make what trains it a "
                "part of the model."
            )
        parts, counts = divide(batch, self.stages.parts, equal=training)
        named = [{**self._signature.bind_partial(*args).arguments, **kwargs} for args, kwargs in parts]
        kinds = {each.name: each.kind for each in self._signature.parameters.values()}
        # What forward does not take is for `loss_fn` alone.
        takes_all = self.settings.loss_fn is None or inspect.Parameter.VAR_KEYWORD in kinds.values()
        own = [(args, {n: each for n, each in kwargs.items() if takes_all or n in kinds}) for args, kwargs in parts]
        trained = bytes(each.requires_grad for each in self.model.parameters())
        state = training, torch.is_autocast_enabled(self.device.type), trained
        # Parts of as many samples compute alike.
        alike = {count: (each, (*state, shapes(each))) for count, each in dict(zip(counts, own, strict=True)).items()}
        found = {count: self._flow_of(each, training, key) for count, (each, key) in alike.items()}
        key = tuple(counts), *(key for _, key in alike.values())
        flows, shares = [found[count] for count in counts], weights(self.model, named, counts)
        return _Step(key, training, plain, own, named, flows, shares, counts)

    def _flow_of(self, batch: Call, training: bool, key: Hashable) -> Flow:
        flow = self._flows.get(key)
        if flow is None:
            with torch.set_grad_enabled(training):
                flow = trace(self.model, self.model.forward, self.blocks, self.calls, batch, self.device)
            loss = loss_in(flow.outputs[-1].filled(lambda _, leaf: leaf.placeholder(self.device)))
            if training and self.settings.loss_fn is None and loss is None:
                raise PreparationError(
                    "The last stage of a pipeline computes the loss; got none from "
                    f"{type(self.model).__name__}. Pass the labels to the model, or PipelineKwargs(loss_fn=…)."
                )
            read = [flow.needed(*self.stages.span(stage)) for stage in range(self.stages.count)]
            drawn = (each for one in read for each in one if isinstance(each, Drawn))
            several = next((each.operator for each in drawn if sum(each in one for one in read) > 1), None)
            if several is not None:
                raise PreparationError(
                    "Each stage of a pipeline draws random numbers of its own; got some outside of blocks that several "
                    f"stages read, by {several}. Draw them before the model is called, and pass them to it."
                )
            needed = frozenset[Source]().union(*(read[stage] for stage in self.own))
            lost = [name for name, holders in (self._glue or {}).items() if self.rank not in holders and name in needed]
            if lost:
                raise PreparationError(
                    "Each stage of a pipeline computes with the parameters that it needed for the first batch; got "
                    f"{', '.join(lost)} for a later one. Let all batches run the same layers."
                )
            if len(self._flows) >= _FLOWS:
                self._flows.pop(next(iter(self._flows)))
            self._flows[key] = flow
        return flow

    def _meet(self, own: torch.Tensor, failure: Exception | None) -> torch.Tensor:
        """Return the number of each rank of the pipeline; raise on all of them if one failed."""
        sent = torch.stack([own, torch.full_like(own, failure is not None)])
        everybody = [torch.empty_like(sent) for _ in range(self.group.size())]
        dist.all_gather(everybody, sent, group=self.group)
        numbers, failed = torch.stack(everybody).unbind(1)
        if failed.any():
            texts: list[Any] = [None] * self.group.size()
            dist.all_gather_object(texts, failure and f"{type(failure).__name__}: {failure}", group=self.group)
            if failure is not None:
                raise failure
            found = next((place, text) for place, text in enumerate(texts) if text is not None)
            raise RemoteRankError(
                f"All ranks of a pipeline compute each batch together; got an error on rank {self._peer(found[0])}: "
                f"{found[1]} Its traceback is in the output of that rank."
            )
        return numbers

    def _train(self, step: _Step) -> object:
        """Compute the loss of a batch and the gradients, which `backward` adds to those that are there."""
        if self._glue is None:
            self.keep_glue(step.flows[0])
        if self._schedule is None or self._schedule.key != step.key:
            self._schedule = self.scheduled(step)
        scheduled = self._schedule
        before = [parameter.grad for parameter in scheduled.trained]
        for parameter in scheduled.trained:
            parameter.grad = None
        try:
            places = torch.arange(self.stages.parts)
            scheduled.schedule.step(index=places, target=places, return_outputs=False)
            total = torch.stack(step.losses).sum() if step.losses else torch.zeros((), device=self.device)
            total = self._meet(total, step.failure)[self.stages.ranks[-1]]
            self.add_shared(scheduled.shared)
            found = [(each, each.grad) for each in scheduled.trained if each.grad is not None]
        finally:
            for parameter, gradient in zip(scheduled.trained, before, strict=True):
                parameter.grad = gradient
        anchor, scale = torch.zeros((), device=self.device, requires_grad=True), self._scaled(torch.ones_like(total))
        loss = _Add.apply(anchor, total, scale, found)  # type: ignore[no-untyped-call]
        plain = self.settings.loss_fn is None and step.flows[0].outputs[-1].structure.is_leaf()
        return loss if plain else Losses(loss=loss)

    def keep_glue(self, flow: Flow) -> None:
        """Free the memory of what is outside of blocks and not needed by the stages here."""
        self._decide(flow)
        self.free(self.model)

    def _decide(self, flow: Flow) -> None:
        """Find out which ranks hold what is outside of blocks: those of the stages that compute with it."""
        ranks: dict[Source, set[int]] = {}
        for stage, rank in enumerate(self.stages.ranks):
            for source in flow.needed(*self.stages.span(stage)):
                ranks.setdefault(source, set()).add(rank)
        inside = {id(parameter) for block in self.blocks.values() for parameter in block.parameters()}
        names = [name for name, each in self._named().items() if id(each) not in inside]
        for stage in range(1, self.stages.count):
            start = self.stages.starts[stage]
            leaves = ", ".join(f"{self.stages.blocks[b]}[{place}]" for b, place in flow.crossing(start))
            _logger.info("Stage %d begins with %s, and receives %s.", stage, self.stages.blocks[start], leaves)
        # What nothing needs stays on the first rank, which saves it.
        self._glue = {name: tuple(sorted(ranks.get(name, {0}))) for name in names}
        self._holders = None

    def add_shared(self, shared: Sequence[nn.Parameter]) -> None:
        """Add up the gradients of parameters that several stages hold: everywhere in one order, so they stay equal."""
        moves: list[dist.P2POp] = []
        sums: list[list[torch.Tensor]] = []
        for parameter in shared:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            sums.append([])
            for place in self.holders(parameter):
                sums[-1].append(own if place == self.rank else torch.empty_like(own))
                if place != self.rank:
                    for move, tensor in ((dist.isend, own), (dist.irecv, sums[-1][-1])):
                        moves.append(dist.P2POp(move, tensor, self._peer(place), self.group))
        for work in dist.batch_isend_irecv(moves) if moves else ():
            work.wait()
        for parameter, parts in zip(shared, sums, strict=True):
            parameter.grad = reduce(torch.add, parts)

    def scheduled(self, step: _Step) -> _Scheduled:
        """Return torch's schedule for batches of the shapes of this one."""
        flow, made = step.flows[0], list[pipelining.PipelineStage]()
        split = self.settings.schedule in SPLIT_BACKWARD
        for stage in self.own:
            span, last = self.stages.span(stage), stage == self.stages.count - 1
            crossing = flow.crossing(span[0]) if stage else ()
            leaving = [Leaf((), torch.float32, True)] if last else [flow.leaf(each) for each in flow.crossing(span[1])]
            leaves = [flow.leaf(source) for source in crossing], leaving
            inputs, outputs = (tuple(leaf.like("meta") for leaf in each) for each in leaves)
            # torch computes gradients of weights apart where a chain of layers leads from one input to one output.
            chain = len(crossing) == 1 and not any(isinstance(each, str) for each in flow.needed_inside(*span))
            apart = None if chain or not split or not stage else lambda: lambda: None
            module = _StageModule(self, stage, len(crossing), self._trained(flow, span))
            own = self.stages.count, self.device, inputs, outputs
            made.append(self.stage_type(module, stage, *own, group=self.group, dw_builder=apart))
        kind = getattr(pipelining, SCHEDULES[self.settings.schedule])
        several = self.stages.count > self.group.size()
        schedule = kind(
            made if several else made[0], self.stages.parts, loss_fn=lambda loss, _: loss, scale_grads=False
        )
        trained = {id(each): each for stage in made for each in stage.submod.parameters()}
        shared = [each for each in self.model.parameters() if id(each) in trained and len(self.holders(each)) > 1]
        return _Scheduled(step.key, schedule, [*trained.values()], shared)

    def _trained(self, flow: Flow, span: tuple[int, int]) -> list[nn.Parameter]:
        needed = flow.needed(*span)
        own = [parameter for name, parameter in self._named().items() if name in needed]
        own += [each for block in [*self.blocks.values()][slice(*span)] for each in block.parameters()]
        return [each for each in {id(each): each for each in own}.values() if each.requires_grad]

    def compute(self, stage: int, part: int, received: Sequence[torch.Tensor]) -> Any:
        """Return what crosses the cut after a stage; of the last one what the model returns, or in training the loss.

        After an error only memory leaves a stage, so that no other rank waits.
        """
        step = self.step
        assert step is not None  # schedules run inside of one
        flow, end = step.flows[part], self.stages.span(stage)[1]

        def instead() -> Any:
            if stage == self.stages.count - 1:
                return torch.zeros((), device=self.device, requires_grad=step.training)
            return tuple(flow.leaf(source).empty(self.device) for source in flow.crossing(end))

        return step.attempt(lambda: self._pass(step, stage, part, received), instead)

    def _pass(self, step: _Step, stage: int, part: int, received: Sequence[torch.Tensor]) -> Any:
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
        if running.next != span[1]:
            raise running.order_error(running.next)
        if step.training:
            return self.loss_of(step, part, result)
        if not flow.outputs[-1].fits(result):  # others wait for what they know of
            raise PreparationError(
                "A pipeline returns what the model's forward does, in its shapes and number formats; got others from "
                f"{type(self.model).__name__}. Remove the hook that changes them, and change what the model returned."
            )
        return result

    def loss_of(self, step: _Step, part: int, result: object) -> torch.Tensor:
        """Return what a micro-batch adds to the loss of its batch."""
        loss_fn = self.settings.loss_fn
        loss = loss_in(result if loss_fn is None else loss_fn(result, step.named[part]))
        if loss is None:
            raise PreparationError(
                "loss_fn of PipelineKwargs returns the mean loss of a micro-batch as a scalar tensor; got something "
                f"else from {loss_fn}. Return such a tensor."
            )
        share = loss.reshape(()).float() * step.shares[part]
        step.losses.append(share.detach())
        return self._scaled(share)

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss as it comes to `backward`: gradients are computed before, and fp16 needs large ones."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    @torch.no_grad()
    def _evaluate(self, step: _Step) -> object:
        """Return what the model returns for a batch, without gradients."""
        sent: list[tuple[Any, torch.Tensor]] = []  # what is on its way keeps its memory
        results: dict[tuple[int, int], Any] = {}
        for stage in self.own:
            before, after = (self.stages.ranks[each] for each in (stage - 1, (stage + 1) % self.stages.count))
            # NCCL takes the moves of two ranks in one order: where these send each other, after a stage received all.
            late, leaving = len(self.own) > 1 and before == after, list[torch.Tensor]()
            for part, flow in enumerate(step.flows):
                received = results.pop((stage - 1, part), ())
                if stage and before != self.rank:
                    received = [flow.leaf(each).empty(self.device) for each in flow.crossing(self.stages.starts[stage])]
                    for tensor in received:
                        dist.recv(tensor, self._peer(before), group=self.group)
                result = self.compute(stage, part, received)
                if stage == self.stages.count - 1 or after == self.rank:
                    results[stage, part] = result
                else:
                    leaving += result
                if not late or part == len(step.flows) - 1:
                    sent += [(dist.isend(each, self._peer(after), group=self.group), each) for each in leaving]
                    leaving = []
        for work, _ in sent:
            work.wait()
        self._meet(torch.zeros((), device=self.device), step.failure)
        return self._shared_out(step, [*results.values()])

    def _shared_out(self, step: _Step, results: list[Any]) -> object:
        """Give every rank what the last stage returned; with `gather_output=False`, the others get scalars alone."""
        everywhere: list[list[Any]] = []
        for place, flow in enumerate(step.flows):
            leaves = flow.outputs[-1].leaves
            made = tree_leaves(results[place]) if results else [None] * len(leaves)
            everywhere.append(made)
            for number, (leaf, value) in enumerate(zip(leaves, made, strict=True)):
                if isinstance(leaf, Leaf) and (self.settings.gather_output or not leaf.shape):
                    sent = leaf.empty(self.device) if value is None else value.contiguous()
                    dist.broadcast(sent, self._peer(self.stages.ranks[-1]), group=self.group)
                    made[number] = sent
        return joined([flow.outputs[-1] for flow in step.flows], everywhere, step.shares, step.counts)


@record
class _Step:
    """One batch on its way."""

    key: Hashable
    training: bool
    plain: Callable[..., Any]
    parts: list[Call]
    named: list[dict[str, Any]]
    flows: list[Flow]
    shares: list[float]
    counts: list[int]
    losses: list[torch.Tensor] = field(default_factory=list)
    failure: Exception | None = None

    def attempt(self, function: Callable[[], _T], instead: Callable[[], _T]) -> _T:
        """Return what a function returns; from the first error on, which all ranks learn of in the end, another's."""
        if self.failure is None:
            try:
                return function()
            except Exception as error:
                cause = error.__cause__ if _TORCHS_OWN in str(error) else None
                self.failure = cause if isinstance(cause, Exception) else error
        return instead()


@record
class _Scheduled:
    """One of torch's schedules, and whose gradients it computes."""

    key: Hashable
    schedule: Any
    trained: list[nn.Parameter]
    shared: list[nn.Parameter]


@record
class _Running:
    """One pass of a stage on a micro-batch."""

    flow: Flow
    span: tuple[int, int]
    values: dict[tuple[int, int], torch.Tensor]
    device: torch.device
    names: tuple[str, ...]
    next: int = 0

    def call(self, number: int, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Return what a block of an earlier stage returned, run one of this stage, or end the pass."""
        if number != self.next:
            raise self.order_error(number)
        self.next += 1
        if number == self.span[1]:
            raise _Reached
        outputs = self.flow.outputs[number]
        if number < self.span[0]:
            return outputs.filled(lambda place, leaf: self.values.get((number, place), leaf.placeholder(self.device)))
        result = plain(*args, **kwargs)
        if not outputs.fits(result):
            raise self.order_error(number)
        leaves = zip(outputs.leaves, tree_leaves(result), strict=True)
        self.values |= {(number, place): value for place, (leaf, value) in enumerate(leaves) if isinstance(leaf, Leaf)}
        return result

    def order_error(self, number: int) -> PreparationError:
        """Return the error of a pass that runs a block out of order."""
        return PreparationError(
            "A pipeline must run its blocks in the same order for equal shapes; got another order, or other outputs, "
            f"at {self.names[number]} than in the pass without values. Remove what skips layers at random or by values."
        )


class _StageModule(nn.Module):
    """What torch's schedules call: a stage, with the number of the micro-batch as an argument."""

    def __init__(self, pipeline: Pipeline, stage: int, inputs: int, trained: list[nn.Parameter]) -> None:
        super().__init__()
        self.pipeline, self.stage, self.inputs, self.trained = pipeline, stage, inputs, trained
        blocks = [*pipeline.blocks.values()][slice(*pipeline.stages.span(stage))]
        self.sharded = tuple(block for block in blocks if isinstance(block, FSDPModule))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters that this stage trains; the model itself is not a part of this module."""
        return iter(self.trained)

    def forward(self, *received: torch.Tensor, index: torch.Tensor) -> object:
        """Return what crosses the next cut, or what the micro-batch adds to the loss."""
        split = self.pipeline.settings.schedule in SPLIT_BACKWARD
        own = [_SendGrad.apply(each) if split else each for each in received]  # type: ignore[no-untyped-call]
        result = self.pipeline.compute(self.stage, int(index), own)
        # Schedules that compute gradients of inputs and of weights apart detach what a stage returns: no view.
        return tuple(each.clone() for each in result) if split and isinstance(result, tuple) else result


class Stage(pipelining.PipelineStage):
    """A stage that reduces gradients of shards after the last micro-batch, and after an error goes on without them."""

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Compute gradients of inputs, of weights or of both; torch sends zeros for those that are missing."""
        # Every kind of backward pass comes through here. After an error only this is left out: the next step needs what
        # torch does around it, such as taking what was received.
        module: Any = self.submod
        for block in module.sharded:
            block.set_requires_gradient_sync(last_backward)
        plain = partial(super().backward_maybe_with_nosync, backward_type, bwd_kwargs, last_backward)
        return module.pipeline.step.attempt(plain, lambda: ((None,) * module.inputs, None))


class _SendGrad(torch.autograd.Function):
    """The identity, which makes its gradient contiguous, as it is sent."""

    @staticmethod
    def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


class _Add(torch.autograd.Function):
    """The loss of a batch, whose gradients are there already: the backward pass adds them where gradients add up."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, scale: torch.Tensor, found: Any) -> torch.Tensor:
        ctx.found, ctx.scale = found, scale
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None]:
        found, ctx.found = ctx.found, None
        if found is None:
            raise StateError(
                "The gradients of a batch in a pipeline are added once; got a second backward pass of its loss. Add "
                "losses up before backward."
            )
        own, gradient = [local_part(each) for _, each in found], gradient / ctx.scale
        if own and not (gradient.device.type == "cpu" and gradient.item() == 1):
            foreach_mul_(own, gradient.to(own[0].device))
        for parameter, new in found:
            parameter.grad = new if parameter.grad is None else parameter.grad.add_(new)
        return None, None, None, None
