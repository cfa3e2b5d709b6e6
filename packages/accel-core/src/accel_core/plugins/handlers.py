"""Keyword arguments for the parts of torch that a run is built from."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from accel_core._records import record
from accel_core.errors import expect_flags, expect_one_of
from accel_core.options.enums import DDPCommunicationHookType

if TYPE_CHECKING:
    import torch

ProfilerActivityName = Literal["cpu", "xpu", "mtia", "cuda", "hpu"]

PROFILE_PATTERN_NAME = "profile_{suffix}.json"
_OF_OURS = ("activities", "schedule_option", "output_trace_dir")
"""Fields of `ProfileKwargs` that are not arguments of torch's profiler as they are."""

_NCCL_TIMEOUT = timedelta(minutes=10)
_OTHER_TIMEOUT = timedelta(minutes=30)


class KwargsHandler:
    """Base of the dataclasses that become keyword arguments of something else.

    Examples:
        >>> from accel import GradScalerKwargs  # one of its subclasses
        >>> GradScalerKwargs(init_scale=1024.0).to_kwargs()
        {'init_scale': 1024.0}
    """

    extension: ClassVar[str] = ""
    """Name of the engine whose `Extension` it adds to the run; empty where it adds none."""

    def __post_init__(self) -> None:
        """Refuse a text where true or false belongs."""
        expect_flags(type(self), vars(self))

    def to_dict(self) -> dict[str, Any]:
        """Return a deep copy of all fields."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """Return a deep copy of the fields whose value differs from their default."""
        unset = self._unset()
        return {name: value for name, value in self.to_dict().items() if name not in unset or unset[name] != value}

    def _unset(self) -> dict[str, Any]:
        """Return every field with the value it has when neither code nor environment sets it."""
        return type(self)().to_dict()


def in_use(plugins: Iterable[Any]) -> Any:
    """Return the plugin that is in use: of several, the one that is selected, or the first; `None` where none is."""
    given = list(plugins)
    return next((plugin for plugin in given if getattr(plugin, "selected", False)), next(iter(given), None))


@record
class AutocastKwargs(KwargsHandler):
    """Arguments of `torch.autocast`.

    Args:
        enabled: Whether the block computes in the run's mixed precision at all.
        cache_enabled: Whether casts of the same weight are kept for the length of the block.

    Examples:
        >>> accelerator = Accelerator(mixed_precision="bf16")
        >>> with accelerator.autocast(AutocastKwargs(enabled=False)):
        ...     scores = torch.rand(2, 64) @ torch.rand(64, 10)
        >>> scores.dtype
        torch.float32
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@record
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of `torch.nn.parallel.DistributedDataParallel`, and how it compresses gradients.

    Args:
        dim: Dim along which inputs are scattered.
        broadcast_buffers: Whether buffers are made equal on all ranks before each forward pass.
        bucket_cap_mb: Size of a gradient bucket in MiB.
        find_unused_parameters: Whether parameters that take no part in a loss are looked for at each step.
        check_reduction: Accepted and without effect, as in torch.
        gradient_as_bucket_view: Whether gradients are views into the buckets, which saves one copy of them.
        static_graph: Whether you promise that the graph never changes.
        comm_hook: How gradients are compressed on the wire.
        comm_wrapper: Number format around `comm_hook`: none, FP16 or BF16.
        comm_state_option: Arguments of the state of a PowerSGD hook (`PowerSGDState`).

    Raises:
        ConfigurationError: The hook or the wrapper is not known.

    Examples:
        >>> settings = DistributedDataParallelKwargs(find_unused_parameters=True)
        >>> accelerator = Accelerator(kwargs_handlers=[settings])
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False

    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: Literal[DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16] = (
        DDPCommunicationHookType.NO
    )
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a hook or wrapper that would later be ignored silently."""
        super().__post_init__()
        expect_one_of(DDPCommunicationHookType.list(), "comm_hook", str(self.comm_hook))
        expect_one_of(("no", "fp16", "bf16"), "comm_wrapper", str(self.comm_wrapper))

    @property
    def _wrapper(self) -> DDPCommunicationHookType:
        return DDPCommunicationHookType(self.comm_wrapper)

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return a deep copy of the fields that `DistributedDataParallel` itself takes.

        Args:
            ignore_keys: Fields left out.
        """
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Register the configured communication hook, if any, on a wrapped model.

        Args:
            model: A `DistributedDataParallel` that has no hook yet.
        """
        hook = DDPCommunicationHookType(self.comm_hook)
        if hook is DDPCommunicationHookType.NO and self._wrapper is DDPCommunicationHookType.NO:
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hooks: dict[str, Callable[..., Any]] = {
            "no": default_hooks.allreduce_hook,
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": default_hooks.bf16_compress_hook,
            "power_sgd": powerSGD_hook.powerSGD_hook,
            "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook,
        }
        wrappers = {"fp16": default_hooks.fp16_compress_wrapper, "bf16": default_hooks.bf16_compress_wrapper}
        function = hooks[hook.value]
        if self._wrapper.value in wrappers:
            function = wrappers[self._wrapper.value](function)
        state = None
        if "power_sgd" in hook.value:
            state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option)  # over the default process group
        model.register_comm_hook(state=state, hook=function)


@record
class GradScalerKwargs(KwargsHandler):
    """Arguments of `torch.amp.GradScaler`.

    Args:
        init_scale: Factor on the loss at the start.
        growth_factor: What the factor is multiplied by after `growth_interval` good steps.
        backoff_factor: What it is multiplied by after a step with infinite or NaN gradients.
        growth_interval: Number of good steps in a row before it grows.
        enabled: Whether the loss is scaled at all.

    Examples:
        >>> settings = GradScalerKwargs(init_scale=1024.0)
        >>> accelerator = Accelerator(kwargs_handlers=[settings])  # for mixed_precision="fp16"
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@record
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of `torch.distributed.init_process_group`.

    Args:
        backend: Name of the collective backend; the default is replaced by the one that fits the device.
        init_method: URL by which the processes find each other.
        timeout: How long a collective may take; 10 minutes for nccl and 30 for others where it is `None`.

    Examples:
        >>> from datetime import timedelta
        >>> settings = InitProcessGroupKwargs(timeout=timedelta(hours=2))
        >>> accelerator = Accelerator(kwargs_handlers=[settings])
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        """Fill the time limit from the backend."""
        if self.timeout is None:
            self.timeout = _NCCL_TIMEOUT if self.backend == "nccl" else _OTHER_TIMEOUT


@record
class MeterKwargs(KwargsHandler):
    """Measure the steps of a run: where their time goes, samples and tokens a second, FLOPs, their share of the peak.

    The numbers are in `accelerator.meter.last`, a `Measurement`, and go to the trackers as `meter/...`. The first step
    is not measured, nor is one in which FLOPs are counted: that takes longer.

    Args:
        flops: `"auto"` counts those of a step when its shapes are new, with the formulas of torch's `FlopCounterMode`;
            a number is that of forward and backward for one sample; `None` counts none. Passes without gradients do
            not count. Where torch.compile compiles a checkpointed part itself, its second forward pass does.
        peak_flops: The most FLOPs a second of a rank's device; `"auto"` looks them up by its name, and measures those
            of a CPU. Where it does not know the device there is no utilization; `None` leaves it out.
        tokens: How tokens are counted: a key of the batch, whose `attention_mask` leaves out what only fills up, or a
            function from the batch to a number; `None` counts none.
        every: Number of optimizer steps between two measurements, in which ranks exchange a few numbers once.

    Examples:
        >>> accelerator = Accelerator(kwargs_handlers=[MeterKwargs(tokens="input_ids", every=100)])
        >>> accelerator.meter.last is None  # until 100 steps were made
        True
    """

    extension: ClassVar[str] = "meter"

    flops: float | Literal["auto"] | None = "auto"
    peak_flops: float | Literal["auto"] | None = "auto"
    tokens: str | Callable[[Any], Any] | None = None
    every: int = 50


@record
class ProfileKwargs(KwargsHandler):
    """Arguments of `torch.profiler.profile`, and where its traces go.

    Args:
        activities: What to record: "cpu", "cuda", "xpu", "mtia", "hpu"; all that the machine has where `None`.
        schedule_option: Arguments of `torch.profiler.schedule` (wait, warmup, active, repeat, skip_first), in steps.
        on_trace_ready: Called with the profiler each time a trace is complete.
        record_shapes: Whether shapes of operator inputs are recorded.
        profile_memory: Whether allocated and freed memory is recorded.
        with_stack: Whether source lines are recorded.
        with_flops: Whether floating-point operations are estimated.
        with_modules: Whether the module hierarchy is recorded.
        output_trace_dir: Folder for one Chrome trace per rank; none is written where `None`.

    Examples:
        >>> settings = ProfileKwargs(activities=["cpu"], record_shapes=True, output_trace_dir="traces")
        >>> accelerator = Accelerator(kwargs_handlers=[settings])
        >>> with accelerator.profile():
        ...     scores = model(torch.rand(2, 64))
    """

    activities: list[ProfilerActivityName] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> torch.profiler.profile:
        """Make the profiler.

        Returns:
            A profiler that has not been started.

        Raises:
            ConfigurationError: An activity is not one that the installed torch can record.
        """
        import torch

        schedule = torch.profiler.schedule(**self.schedule_option) if self.schedule_option is not None else None
        return torch.profiler.profile(
            activities=self._activities(),
            schedule=schedule,
            **{name: value for name, value in vars(self).items() if name not in _OF_OURS},
        )

    def _activities(self) -> list[torch.profiler.ProfilerActivity] | None:
        if self.activities is None:
            return None
        import torch

        known = {name.lower(): value for name, value in torch.profiler.ProfilerActivity.__members__.items()}
        for name in self.activities:
            expect_one_of(sorted(known), "an activity of the profiler", name)
        return [known[name] for name in self.activities]


@contextmanager
def profile(handler: ProfileKwargs, rank: int) -> Iterator[torch.profiler.profile]:
    """Profile the block, and write the trace of this rank where the settings name a folder."""
    folder = handler.output_trace_dir
    if folder is not None:
        os.makedirs(folder, exist_ok=True)  # one that cannot be made is known before the block runs
    with handler.build() as profiler:
        yield profiler
    if folder is not None:
        profiler.export_chrome_trace(os.path.join(folder, PROFILE_PATTERN_NAME.format(suffix=rank)))
