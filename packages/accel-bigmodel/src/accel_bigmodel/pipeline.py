"""A model cut into stages, one per process, that micro-batches flow through (torch.distributed.pipelining)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_bigmodel._torch import without_greetings
from accel_bigmodel.device_map.infer import infer_auto_device_map
from accel_bigmodel.sizes import calculate_maximum_sizes
from accel_core.comm.batch import find_batch_size, pad_input_tensors, send_to_device, slice_tensors
from accel_core.comm.objects import broadcast_object_list
from accel_core.errors import ConfigurationError
from accel_core.host.versions import require_torch
from accel_core.process.world import ensure

if TYPE_CHECKING:
    from torch.distributed.pipelining import ScheduleGPipe


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
) -> dict[str, int | str]:
    """Cut a model into about equal parts, one per process."""
    if num_processes == 1:
        return infer_auto_device_map(model, max_memory=max_memory, no_split_module_classes=no_split_module_classes)
    if max_memory is None:
        total, (largest, _) = calculate_maximum_sizes(model)
        share = math.ceil((total + largest) / num_processes)
        max_memory = dict.fromkeys(range(num_processes), share)
    return infer_auto_device_map(
        model, max_memory=max_memory, no_split_module_classes=no_split_module_classes, clean_result=False
    )


def find_pippy_batch_size(args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> int | None:
    """Find the batch size of the inputs of a forward."""
    for value in (*(args or ()), *(kwargs or {}).values()):
        if isinstance(value, torch.Tensor) and value.dim():
            return int(value.shape[0])
    return None


def build_pipeline(
    model: nn.Module, split_points: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], num_chunks: int
) -> ScheduleGPipe:
    """Trace a model and make this process's stage of it.

    Raises:
        ConfigurationError: When the stages are not as many as the processes.
        TorchVersionError: When the model has an `nn.Sequential`, which the tracer cannot follow before torch 2.10.
    """
    if any(isinstance(module, nn.Sequential) for module in model.modules()):
        require_torch("pipeline_of_sequential")
    # Imported here because it brings torch's compiler with it, more than a second that most programs do not need.
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    world = ensure()
    spec = dict.fromkeys(split_points, SplitPoint.BEGINNING)
    pipe = pipeline(model, mb_args=tuple(args), mb_kwargs=dict(kwargs), split_spec=spec)
    if pipe.num_stages != world.size:
        raise ConfigurationError(
            f"A pipeline has one stage per process; got {pipe.num_stages} stages and {world.size} processes. Pass "
            f"{world.size - 1} split points, or run with another number of processes."
        )
    stage = without_greetings(pipe.build_stage(world.rank, device=world.device))
    return ScheduleGPipe(stage, num_chunks)


class _Pipeline:
    """The forward of a model that is cut into stages."""

    def __init__(self, model: nn.Module, split_points: Sequence[str], num_chunks: int) -> None:
        self.forward = model.forward
        self.model = model
        self.split_points = list(split_points)
        self.num_chunks = num_chunks
        self._schedules: dict[tuple[int, int], ScheduleGPipe] = {}

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any], num_chunks: int) -> ScheduleGPipe:
        """Return the schedule for batches like these; stages have fixed shapes, so each batch size has its own."""
        size = find_pippy_batch_size(args, kwargs) or num_chunks
        key = (size, num_chunks)
        if key not in self._schedules:
            part = slice(0, size // num_chunks)
            sample_args, sample_kwargs = slice_tensors(tuple(args), part), slice_tensors(dict(kwargs), part)
            wrapped = self.model.__dict__.pop("forward", None)  # this pipeline, which is not to be traced
            try:
                self._schedules[key] = build_pipeline(
                    self.model, self.split_points, sample_args, sample_kwargs, num_chunks
                )
            finally:
                if wrapped is not None:
                    object.__setattr__(self.model, "forward", wrapped)
        return self._schedules[key]

    def __call__(self, num_chunks: int, *args: Any, **kwargs: Any) -> Any:
        """Run a batch; only the last process gets the output."""
        world = ensure()
        schedule = self.prepare(args, kwargs, num_chunks)
        if world.rank == 0:
            schedule.step(*args, **kwargs)
            return None
        output = schedule.step()
        return output if world.is_last else None


def _whole_chunks(args: Sequence[Any], kwargs: Mapping[str, Any], num_chunks: int) -> tuple[int, Any, Any]:
    """Return a batch's size, and its inputs on the device, padded to whole micro-batches."""
    device, size = ensure().device, find_pippy_batch_size(args, kwargs)
    if size is None:
        raise ConfigurationError(
            "A pipeline needs to know the batch size; got no tensor among the inputs. Pass at least one tensor whose "
            "first dimension is the batch, to `prepare_pippy` as `example_args` or `example_kwargs`."
        )
    if size % num_chunks:
        args, kwargs = pad_input_tensors((args, kwargs), size, num_chunks)
    return size, send_to_device(args, device), send_to_device(kwargs, device)


def pippy_forward(forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any) -> Any:
    """Run a batch through a pipeline: pad it to whole micro-batches, run, cut the padding off."""
    world = ensure()
    size, args, kwargs = _whole_chunks(args, kwargs, num_chunks)
    with torch.no_grad():
        output = forward(num_chunks, *args, **kwargs)
    if output is not None and size % num_chunks and find_batch_size(output) > size:  # an output may count no samples
        output = slice_tensors(output, slice(0, size))
    if gather_output and world.size > 1:
        carried = [send_to_device(output, "cpu")]  # a pickle would bring it to the device of the last process
        broadcast_object_list(carried, from_process=world.size - 1)
        output = send_to_device(carried[0], world.device)
    return output


def prepare_pippy(
    model: nn.Module,
    split_points: str | list[str] | None = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: tuple[Any, ...] | None = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> nn.Module:
    """Cut a model into stages for pipeline inference: every process runs one of them.

    Args:
        model: The model, changed in place: its forward runs the pipeline.
        split_points: Names of the submodules that a new stage begins with; "auto" cuts into about equal parts.
        no_split_module_classes: Class names of modules that "auto" leaves whole.
        example_args: Positional example inputs, with a batch dimension.
        example_kwargs: Keyword example inputs.
        num_chunks: How many micro-batches a batch is cut into; by default one per process.
        gather_output: Whether every process gets the output; else the last one alone, the others None.

    Returns:
        The model. Its `hf_split_points` are the split points.

    Raises:
        ConfigurationError: When the stages are not as many as the processes, or no example input is a tensor.

    Examples:
        >>> model = prepare_pippy(model, split_points=["head"], example_args=(torch.rand(2, 64),))  # doctest: +SKIP
        >>> scores = model(torch.rand(2, 64))  # doctest: +SKIP
        >>> scores is None  # doctest: +SKIP
        True
    """
    world = ensure()
    args, kwargs = tuple(example_args or ()), dict(example_kwargs or {})
    chunks = num_chunks or world.size
    if split_points is None:
        split_points = []
    if isinstance(split_points, str):
        if split_points != "auto":
            raise ConfigurationError(
                f"Split points are names of submodules or 'auto'; got {split_points!r}. Pass a list of names."
            )
        split_points = _even_splits(model, world.size, no_split_module_classes)
    object.__setattr__(model, "hf_split_points", split_points)
    if world.size == 1:
        return model
    model.eval()
    model.to(world.device)
    stages = _Pipeline(model, split_points, chunks)
    _, args, kwargs = _whole_chunks(args, kwargs, chunks)
    with torch.no_grad():
        stages.prepare(args, kwargs, chunks)

    def forward(_: nn.Module, *args: object, **kwargs: object) -> Any:
        return pippy_forward(stages, chunks, bool(gather_output), *args, **kwargs)

    object.__setattr__(model, "forward", MethodType(forward, model))
    return model


def _even_splits(model: nn.Module, count: int, no_split_module_classes: Sequence[str] | None) -> list[str]:
    """Name the first submodule of every part but the first."""
    device_map = generate_device_map(model, count, no_split_module_classes)
    points = []
    for number in range(1, count):
        first = next((name for name, device in device_map.items() if device == number), None)
        if first is None:
            raise ConfigurationError(
                f"The model cannot be cut into {count} parts; got {number} that are not empty. Run fewer "
                "processes, or name the split points."
            )
        points.append(first)
    return points
