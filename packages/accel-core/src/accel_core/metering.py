"""Where the time of training steps goes, and how much of the hardware they use; loaded with `MeterKwargs` alone.

Time is a list of marks: a part lasts from its mark to the next, so the parts of a step sum to the step. On a device a
mark is an event in its stream, for which nobody waits: a step is added up once its last event has passed.
"""

from __future__ import annotations

import functools
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from accel_core._records import record
from accel_core._torch import after_gradients, enclose_calls, is_in_backward
from accel_core.comm.arrival import arrive
from accel_core.comm.control import Channel
from accel_core.data.loader import PreparedLoader
from accel_core.data.rows import count_rows
from accel_core.devices.device import module_of
from accel_core.devices.memory import peak_memory
from accel_core.errors import ConfigurationError, EngineUnavailableError
from accel_core.extension import Extension
from accel_core.host.run_card import card
from accel_core.logging import get_logger
from accel_core.optim.optimizer import AcceleratedOptimizer
from accel_core.plugins.handlers import MeterKwargs

if TYPE_CHECKING:
    from accel_core.runtime import Runtime

_logger = get_logger(__name__)
_PARTS = ("waiting", "forward", "backward", "exchange", "optimizer", "saving", "rest", "evaluation")
_WAITING, _FORWARD, _BACKWARD, _EXCHANGE, _OPTIMIZER, _, _REST, _EVALUATION = range(len(_PARTS))
_ARRIVAL = 60.0  # seconds within which all ranks come to their first measured step
_MOST = 100_000  # marks and passes of one step, so that memory does not grow where no step ends
_SIDE, _TRIES = 1024, 5  # of square products that show what a CPU can do
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_PEAKS: tuple[tuple[set[str], tuple[float, float, float]], ...] = (
    # https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
    ({"H200"}, (989.5, 494.7, 67)),
    ({"H100", "HBM3"}, (989.5, 494.7, 67)),
    ({"H100", "PCIE"}, (756, 378, 51)),
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    ({"A100"}, (312, 156, 19.5)),
    # https://www.nvidia.com/en-us/data-center/l40s/ and .../l4/, halved where given with sparsity
    ({"L40S"}, (362, 183, 91.6)),
    ({"L4"}, (121, 60, 30.3)),
)
"""Words of a device's name, and the most TFLOP/s that its maker names without sparsity: with 16 bits, TF32 and 32."""


@record(frozen=True)
class Measurement:
    """What a meter found in the steps since the one before, the same on every rank: means over steps and ranks."""

    steps: int  # number of optimizer steps that were measured
    seconds: float  # length of a step: the sum of the parts from `waiting` to `rest`
    waiting: float  # seconds in which the script waited for a batch of a prepared loader
    # Seconds from a batch, or the call of a prepared model, to `backward`: the loss too, and what ranks with shards
    # exchange in there.
    forward: float
    # Seconds until all gradients of this rank were computed. What is exchanged meanwhile, as where copies are averaged,
    # has none of its own; what ranks with shards exchange between layers counts here.
    backward: float
    # Seconds from then on until `backward` returned, in which it waited for other ranks, and seconds of `gather`,
    # `gather_for_metrics` and `reduce`.
    exchange: float
    optimizer: float  # seconds in the steps of prepared optimizers
    saving: float  # seconds for which `save_state` and `save_model` held the script up
    rest: float  # all else: clipping, schedules, `zero_grad`, logging, the script's own code
    evaluation: float  # seconds for each step, but no part of it, in which loaders were read that do not train
    samples_per_second: float | None  # of all ranks, none twice; `None` where no prepared loader gave any
    tokens_per_second: float | None  # of all ranks, as `MeterKwargs.tokens` counts them
    flops: float | None  # of the model in a step of all ranks, without activations that are computed again, or `None`
    flops_per_second: float | None
    mfu: float | None  # their share of the peak of all devices; `None` where that is not known
    peak_memory: int  # most bytes that were allocated on a device; on CPUs, most memory of a process
    # The rank that took longest outside of exchanges. Where these are inside of forward and backward, as with shards,
    # both are left out too.
    slowest_rank: int
    slowest_seconds: float  # how long that was, for each step


class _FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up FLOPs, by torch's formulas; with `again`, those of what backward computes once more too."""

    supports_higher_order_operators = True

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total, self._again = 0, again

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: what torch.compile meets under another mode, it never compiles any more."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        # Tensors spread over ranks, for instance, make operations on their parts of this one, which come here then.
        if not hasattr(func, "decompose") or any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented
        given = kwargs or {}
        if not _PLAIN.issuperset(types):  # without memory, as those with which shapes are found
            return func(*args, **given)
        formula: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
        if formula is None:
            with self:
                result = func.decompose(*args, **given)
            return func(*args, **given) if result is NotImplemented else result
        result = func(*args, **given)
        # A forward pass that is repeated for backward runs with gradients enabled, and the rest of backward without.
        # Where `create_graph` enables them for all of it, the two cannot be told apart.
        if self._again or not (torch.is_grad_enabled() and is_in_backward()):
            self.total += formula(*args, **given, out_val=result)
        return result


def _shapes(values: Iterable[object]) -> tuple[object, ...]:
    """Return the shapes of all tensors in a nest."""
    return tuple(
        [
            value.shape
            if type(value) is Tensor or isinstance(value, Tensor)
            else _shapes(value.values() if isinstance(value, Mapping) else value)
            if isinstance(value, list | tuple | Mapping)
            else None
            for value in values
        ]
    )


def _peak_flops(device: torch.device, dtype: torch.dtype | None) -> float | None:
    """Return the most FLOPs a second of a device in a number format; `None` where it is not known."""
    if dtype is None:
        return None
    if device.type == "cpu":
        return _measured(dtype)
    named = getattr(module_of(device.type), "get_device_name", None)
    words = set(re.split(r"[\s-]+", named(device).upper())) if named is not None else set()
    # From torch 2.9 on there is a newer setting, and who used it may not ask for the older one.
    exact = getattr(torch.backends.cuda.matmul, "fp32_precision", None) or torch.get_float32_matmul_precision()
    fast = exact not in ("none", "ieee", "highest")
    column = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 1 if fast else 2}.get(dtype)
    if column is None or "NVL" in words:  # a slower device of the same name
        return None
    return next((row[column] * 1e12 for name, row in _PEAKS if words >= name), None)


@functools.cache
def _measured(dtype: torch.dtype) -> float:
    """Return how many FLOPs a second this process does in the best of some square products."""
    side, best = torch.ones(_SIDE, _SIDE, dtype=dtype), float("inf")
    for _ in range(_TRIES):
        begun = time.perf_counter()
        torch.mm(side, side)
        best = min(best, time.perf_counter() - begun)
    return 2 * _SIDE**3 / best


class _Reading:
    """An iteration of a loader: whether it is trained with, and what it gave since the last step."""

    __slots__ = ("passes", "samples", "tokens", "trains")

    def __init__(self, *, trains: bool = False) -> None:
        self.trains = trains
        self.samples = 0
        self.tokens: list[Any] = []
        # Forward passes that no backward pass followed yet.
        self.passes: deque[_FlopCount] = deque(maxlen=_MOST)


def _counting(meter: Meter) -> Callable[..., Any]:
    """Return what the calls of a model go through, for a meter to count their FLOPs."""
    known: dict[object, _FlopCount] = {}  # by the shapes that the model is given

    def call(plain: Callable[..., object], *args: Any, **kwargs: object) -> object:
        if meter._part == _BACKWARD or not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        if meter._part == _REST:
            meter.turn(_FORWARD)
        if not meter._counting:
            return plain(*args, **kwargs)
        meter._counting = False  # of a prepared model inside of this one
        try:
            # Most models get one tensor, and this runs in each step.
            alone = len(args) == 1 and not kwargs and type(args[0]) is Tensor
            shapes = args[0].shape if alone else (_shapes(args), _shapes(kwargs.values()))
            count = known.get(shapes)
            if count is None:
                meter._counts = False
                with _FlopCount() as count:
                    result = plain(*args, **kwargs)
                known[shapes] = count
            else:
                result = plain(*args, **kwargs)
            meter._reading.passes.append(count)
            return result
        finally:
            meter._counting = True

    return call


class Meter(Extension):
    """Measures steps at the borders of a run: a batch, a backward pass, a step, a save. Up to backward it is forward.

    Attributes:
        last (Measurement | None): The numbers of the last `MeterKwargs.every` steps; `None` before them.
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        strategy = self._strategy = runtime.strategy
        if not strategy.divides_loss:
            raise EngineUnavailableError(
                f"A meter sees the steps of prepared optimizers; got MeterKwargs under {strategy.name}, whose "
                "engine makes its own. Leave MeterKwargs out, or train with a strategy of torch."
            )
        settings = self._settings = cast(MeterKwargs, runtime.handlers["MeterKwargs"])
        self.last: Measurement | None = None
        self.is_apart = False  # whether ranks make different numbers of steps
        self._world = strategy.world
        runtime.meter = self
        kind = self._world.device.type
        self._event: type[torch.Event] | None = None if kind == "cpu" else getattr(module_of(kind), "Event", None)
        self._clock: Callable[[], Any] = time.perf_counter if self._event is None else self._mark_stream
        self._thread, self._counting = threading.get_ident(), settings.flops == "auto"
        self._models = weakref.WeakSet[torch.nn.Module]()
        self._backward_flops: dict[Hashable, int] = {None: 0}  # by the counts of passes before it
        self._idle = _Reading(trains=True)
        self._open: list[_Reading] = []
        self._steps, self._since, self._is_whole = 0, 0, True
        self._dtype: torch.dtype | None = torch.float32
        self._peak = 0.0 if isinstance(settings.peak_flops, str | None) else settings.peak_flops
        self._sums = [0.0] * (len(_PARTS) + 4)
        self.restart()

    def restart(self) -> None:
        """Forget what is trained; the next step is not measured, because it may allocate, compile and load."""
        self._first: weakref.ref[Any] | None = None
        self._reading = self._idle
        self._fed: _Reading | None = None
        self._part, self._flops, self._counts = _REST, 0.0, False
        self._last_key: Hashable = ()
        # When each part began, which it is, and in which iteration; the last mark of a step is its end.
        self._marks: list[tuple[Any, int, _Reading]] = [(self._clock(), _REST, self._idle)]
        # Of steps that were made: marks, samples, numbers of tokens, FLOPs, and whether they are measured.
        self._done: list[tuple[list[tuple[Any, int, _Reading]], int, Sequence[Any], float, bool]] = []

    def keep_model(self, model: torch.nn.Module) -> None:
        """See the calls of a prepared model from now on."""
        if model not in self._models:
            self._models.add(model)
            enclose_calls(model, _counting(self))
        trained = next((each for each in model.parameters() if each.requires_grad), None)
        if trained is not None:
            formats = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": None}
            self._dtype = formats.get(self._strategy.number_format.name, trained.dtype)
            self._is_whole = self._is_whole and (self._world.size == 1 or self._strategy.holds_whole(model))

    def release(self) -> None:
        """Let go of every prepared object."""
        self.restart()

    def turn(self, part: int) -> int:
        """Let time count for a part from now on; return the part for which it counted."""
        if len(self._marks) > _MOST:  # much was computed since the last step, which is not measured then
            self._marks, self._counts = [], False
        self._marks.append((self._clock(), part, self._reading))
        before = self._part
        self._part = part
        return before

    def read(self, loader: PreparedLoader, batches: Iterator[Any]) -> Iterator[Any]:
        """Pass the batches of an iteration on, and count what they hold.

        Raises:
            ConfigurationError: A batch has no such entry as `MeterKwargs.tokens` names.
        """
        if threading.get_ident() != self._thread:  # one that reads ahead keeps nobody waiting
            yield from batches
            return
        self._reading = reading = _Reading()
        self._open.append(reading)
        spec, has_tokens = loader.spec, self._settings.tokens is not None
        full = None if spec.step_samples is None else spec.step_samples // spec.ranks
        self.turn(_WAITING)
        try:
            for batch in batches:
                counts = loader.counts
                real = full if counts is None else counts.real[loader.spec.rank]
                reading.samples += (count_rows(batch) or 0) if real is None else real
                if has_tokens:
                    reading.tokens.append(self._tokens(batch, None if counts is None else real))
                self.turn(_FORWARD)
                yield batch
                self._reading = reading
                self.turn(_WAITING)
        finally:
            self._open.remove(reading)
            if self._reading is reading and not reading.trains:
                self._reading = self._open[-1] if self._open else self._idle
            self.turn(_REST if self._part in (_WAITING, _FORWARD) else self._part)

    def _tokens(self, batch: object, real: int | None) -> torch.Tensor | float:
        """Return the number of tokens in a batch, of its first `real` samples where the others are repeats."""
        name, found = self._settings.tokens, 0.0
        if callable(name):
            found = name(batch)
        elif not isinstance(batch, Mapping) or name not in batch:
            raise ConfigurationError(
                f"tokens={name!r} of MeterKwargs is an entry of each batch; got a {type(batch).__name__} with "
                f"{list(batch) if isinstance(batch, Mapping) else 'no names'}. Name one of its entries, or pass a "
                "function from the batch to its number of tokens."
            )
        elif "attention_mask" in batch:
            found = batch["attention_mask"][:real].sum()
        else:
            _logger.warning_once(
                f"All of {name!r} counts as tokens; got batches without an 'attention_mask', which would tell what "
                "only fills them up. Pass MeterKwargs(tokens=function) to count otherwise."
            )
            found = sum(each.numel() for each in batch[name][:real])
        # A copy for which nobody waits: it is there when the last event of the step has passed.
        return found.to("cpu", non_blocking=True) if isinstance(found, torch.Tensor) else found

    def passes(self) -> Hashable:
        """Return a name for the forward passes that backward goes through now, whose FLOPs count from now on."""
        reading = self._reading
        self._fed = reading if reading.trains else self._train()
        if not self._counting:
            return None
        passes = reading.passes
        if len(passes) == 1:
            self._last_key = count = passes.pop()
            self._flops += count.total
            return count
        self._flops += sum(count.total for count in passes)
        self._last_key = tuple(passes) or ("again", self._last_key)
        passes.clear()
        return self._last_key

    def _train(self) -> _Reading:
        """Return the iteration that the step is fed from; loaders that are read around it feed the step as well."""
        for each in (self._reading, *self._open):
            each.trains = True
        return self._reading

    def _begin_exchange(self) -> None:
        if self._part == _BACKWARD:
            self.turn(_EXCHANGE)

    def step(self, run: Callable[..., object], optimizer: AcceleratedOptimizer, closure: object) -> object:
        """Measure the step of an optimizer; of several optimizers, the first ends the steps of the run."""
        self.turn(_OPTIMIZER)
        result = run(closure)
        first = None if self._first is None else self._first()
        if first is not optimizer:
            if first is not None:
                self.turn(_REST)
                return result
            self._first = weakref.ref(optimizer)
        self._part = _REST
        fed = self._fed
        if fed is None:  # gradients came from elsewhere than `accelerator.backward`
            fed = self._train()
            fed.passes.clear()
        end = self._clock(), _REST, self._reading
        self._marks.append(end)
        self._done.append((self._marks, fed.samples, fed.tokens or (), self._flops, self._counts))
        self._marks = [end]
        self._fed = None
        self._flops = 0.0
        self._counts = True
        fed.samples = 0
        if fed.tokens:
            fed.tokens = []
        self._since += 1
        self._steps += 1
        if self._steps == 1 and self._settings.peak_flops == "auto" and self._settings.flops is not None:
            self._peak = _peak_flops(self._world.device, self._dtype) or 0.0
            self._marks = [(self._clock(), _REST, self._reading)]  # measuring a CPU's takes a moment
        if self._since >= self._settings.every and not self.is_apart:
            self.report()
        return result

    def backward(self, run: Callable[..., None], loss: Tensor, weight: object, arguments: dict[str, Any]) -> None:
        """Measure a backward pass."""
        key = self.passes()
        known = self._backward_flops.get(key)
        before = self.turn(_BACKWARD)
        several = self._world.size > 1 or self.runtime.replicas is not None
        if several and getattr(loss, "requires_grad", False):
            # Torch's own function, which waits for exchanges, is put in line later in the pass.
            loss.register_hook(lambda _: after_gradients(self._begin_exchange))  # type: ignore[no-untyped-call]
        try:
            if known is not None:
                run(loss, weight, arguments)
            else:
                self._counts = False
                with _FlopCount(again=bool(arguments.get("create_graph"))) as count:
                    run(loss, weight, arguments)
                known = self._backward_flops[key] = count.total
        finally:
            self.turn(before if before == _OPTIMIZER else _REST)  # the first for one that is given a closure
        self._flops += known

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Let the time of a block count for a part of the step."""
        before = self.turn(_PARTS.index(part))
        try:
            yield
        finally:
            self.turn(before)

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Let ranks make different numbers of steps; they tell each other their numbers after the block."""
        self.is_apart = self._world.size > 1
        try:
            yield
        finally:
            self.is_apart = False
        self.report()

    def report(self) -> None:
        """Tell ranks the numbers of each, and trackers those of all; every rank calls it."""
        self._since = 0
        self._fold()
        steps, samples, tokens, flops = self._sums[len(_PARTS) :]
        if self._world.rank not in self._strategy.reading.readers:  # ranks of one replica read the same samples
            samples = tokens = 0.0
        if isinstance(self._settings.flops, int | float):
            flops = samples * self._settings.flops
        if self.last is None:  # one without a meter would meet the exchange with one of its gradients
            arrive(self._world, f"Measuring steps with MeterKwargs(every={self._settings.every})", _ARRIVAL)
        own = (self._sums[: len(_PARTS)], steps, samples, tokens, flops, self._peak, peak_memory(self._world.device))
        self._sums = [0.0] * len(self._sums)
        group = "" if self._world.device.type == "cpu" else "meter"
        rows = Channel(self._world, "measuring steps", group_name=group).exchange(own)
        measured = {rank: row for rank, row in enumerate(rows) if row[1]}
        if measured:
            self.last = self._measurement(measured, max(row[-1] for row in rows))
            if card.wanted and self.last.mfu is not None:
                card.utilization(self.last.mfu)
            named = {f"meter/{each.name}": getattr(self.last, each.name) for each in fields(self.last)}
            values = {name: value for name, value in named.items() if value is not None}
            self.runtime.hub.log_at_last_step(values, self._steps)

    def _measurement(self, rows: dict[int, Any], memory: int) -> Measurement:
        mean = [sum(row[0][part] / row[1] for row in rows.values()) / len(rows) for part in range(len(_PARTS))]
        seconds = sum(mean[:_EVALUATION])
        samples, tokens, flops = (sum(row[place] / row[1] for row in rows.values()) for place in (2, 3, 4))
        inside = () if self._is_whole else (_FORWARD, _BACKWARD)
        own = [part for part in range(_EVALUATION) if part not in (_EXCHANGE, *inside)]
        busy = {rank: sum(row[0][part] for part in own) / row[1] for rank, row in rows.items()}
        slowest = max(busy, key=lambda rank: busy[rank])
        peaks = [row[5] for row in rows.values()]
        return Measurement(
            steps=int(max(row[1] for row in rows.values())),
            seconds=seconds,
            **dict(zip(_PARTS, mean, strict=True)),
            samples_per_second=samples / seconds or None,
            tokens_per_second=None if self._settings.tokens is None else tokens / seconds,
            flops=flops or None,
            flops_per_second=flops / seconds or None,
            mfu=flops / seconds / sum(peaks) if flops and all(peaks) else None,
            peak_memory=memory,
            slowest_rank=slowest,
            slowest_seconds=busy[slowest],
        )

    def _fold(self) -> None:
        """Add up the steps that are over on the device too; the others stay for the next time."""
        sums, on_host = self._sums, self._event is None
        while self._done and (on_host or self._done[0][0][-1][0].query()):
            marks, samples, tokens, flops, counts = self._done.pop(0)
            if not counts:
                continue
            begun, part, reading = marks[0]
            for now, then, following in marks:
                took = now - begun if on_host else begun.elapsed_time(now) / 1e3
                sums[part if reading.trains else _EVALUATION] += took
                begun, part, reading = now, then, following
            sums[-4] += 1
            sums[-3] += samples
            sums[-2] += sum(map(float, tokens)) if tokens else 0.0
            sums[-1] += flops

    def _mark_stream(self) -> torch.Event:
        """Record an event after the work that is queued on the device, and return it."""
        assert self._event is not None, "a device without events has the clock of the host"
        event = self._event(enable_timing=True)
        event.record()
        return event
