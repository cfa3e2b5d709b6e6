"""The memory of a training step on one rank of a layout, found by running the step on tensors without memory."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from accel_core._records import record
from accel_core._torch import fake_mode
from accel_core.errors import AccelError, ConfigurationError
from accel_core.mesh.spec import LayoutSpec
from accel_core.mesh.tensor import local_part
from accel_parallel.sharding.optimizer_step import step_one_by_one
from accel_plan._torch import tree_leaves
from accel_plan.live_bytes import LiveBytes
from accel_plan.training.pipelined import PipelinedModel, PipelinePlan, plan_of_pipeline
from accel_plan.training.sharing import SharedModel, check_layout, laid_out, weights_dtype
from accel_plan.training.workload import TrainingWorkload, call_of

__all__ = ["PURPOSES", "TrainingMemory", "predict"]

PURPOSES = (
    "weights",
    "gradients",
    "optimizer",
    "communication",
    "activations",
    "logits",
    "workspace",
    "batch",
)
"""What the memory of training is used for; see `TrainingMemory`."""


@record(frozen=True)
class TrainingMemory:
    """The bytes that one rank needs for a training step.

    Categories: "weights" are parameters and buffers that the rank holds; "gradients" those of them;
    "optimizer" its states; "communication" gathered layers, what is reduced and buckets; "activations" what the forward
    pass made and the backward pass needs; "logits" what the model returns; "workspace" what passes and steps make for
    themselves; "batch" the data.

    Attributes:
        checkpointing: Whether activations are computed again in the backward pass.
        peak: The most bytes alive at once.
        at_peak: What they are for.
        most: For each purpose, the most bytes of it that are alive at once, at one time or another.
        pipeline: Of a pipeline, how it shares the model out; the bytes are those of the rank that needs most.
    """

    layout: str
    ranks: int
    checkpointing: bool
    peak: int
    at_peak: dict[str, int]
    most: dict[str, int]
    pipeline: PipelinePlan | None = None


def predict(
    make_model: Callable[[], nn.Module], spec: LayoutSpec, workload: TrainingWorkload, *, checkpointing: bool = False
) -> TrainingMemory:
    """Find the memory of a training step on the rank of a layout that needs most.

    That is the first, whose parts are never smaller than others'; of a pipeline, one of those that hold other stages.

    The code that trains splits, shards and averages the model; its operations make tensors that have no memory, and
    those alive at once are counted. Nothing is read, computed or sent.

    Raises:
        ConfigurationError: The step cannot be shared out so, nothing is trained, or the forward pass cannot be traced.
        EngineUnavailableError: The layout's engine is not traced.
        PreparationError: The model cannot be split or sharded so.
        StateError: This process is in a process group.
    """
    check_layout(spec, workload)
    ranks = spec.layout().group("pp")
    found = [_on_rank(make_model, spec, workload, checkpointing, rank) for rank in ranks]
    largest = max(found, key=lambda each: each.peak)
    if len(ranks) == 1:
        return largest
    dtype = weights_dtype(spec, workload)
    with _traced(model := make_model()):
        plan = plan_of_pipeline(
            model,
            lambda each: _give_device(each, dtype, workload.dtype),
            spec,
            workload,
            [(each.peak, each.at_peak) for each in found],
        )
    return replace(largest, pipeline=plan)


@contextmanager
def _traced(model: nn.Module) -> Iterator[None]:
    """Refuse a model whose pass needs values, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever trains the model sees them then
        try:
            yield
        except AccelError:
            raise
        except Exception as failure:
            raise ConfigurationError(
                f"A training step of {type(model).__name__} cannot be traced without data; got "
                f"{type(failure).__name__}: {failure} Check --sequence, --sample and --loss, and leave out of the "
                "forward pass what reads values of tensors."
            ) from failure


def _on_rank(
    make_model: Callable[[], nn.Module], spec: LayoutSpec, workload: TrainingWorkload, checkpointing: bool, rank: int
) -> TrainingMemory:
    model = make_model()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigurationError(
            f"A training step trains parameters; got a {type(model).__name__}, none of whose parameters requires a "
            "gradient. Unfreeze those that you train."
        )
    with laid_out(spec, rank) as mesh:
        mode = fake_mode()
        counter = LiveBytes("weights", mode)
        with mode:
            _give_device(model, weights_dtype(spec, workload), workload.dtype)
        with _traced(model):
            # Meshes are laid out here, whose numbers are read: not in the mode.
            if mesh is not None and spec.size("pp") > 1:
                shared: SharedModel = PipelinedModel(model.train(), spec, workload, checkpointing, mesh)
            else:
                shared = SharedModel(model.train(), spec, workload, checkpointing, mesh)
            with mode, counter:
                _run(shared, spec, workload, counter)
    return TrainingMemory(
        spec.name, spec.ranks, checkpointing, counter.peak, _sorted(counter.at_peak), _sorted(counter.most)
    )


def _sorted(nbytes: dict[str, int]) -> dict[str, int]:
    return {purpose: nbytes.get(purpose, 0) for purpose in PURPOSES}


def _give_device(model: nn.Module, dtype: torch.dtype | None, buffer_dtype: torch.dtype | None) -> None:
    """Let a model's tensors be on a device, without memory there; ties stay."""
    made: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}

    def empty(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=cast, device="cpu")

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = parameter, nn.Parameter(empty(parameter, dtype), parameter.requires_grad)
            module._parameters[name] = made[id(parameter)][1]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = empty(buffer, buffer_dtype)


def _held(model: nn.Module) -> list[torch.Tensor]:
    return [local_part(tensor.detach()) for tensor in (*model.parameters(), *model.buffers())]


def _run(shared: SharedModel, spec: LayoutSpec, workload: TrainingWorkload, counter: LiveBytes) -> None:
    """Run a training step that has optimizer states, which the step before it makes."""
    model = shared.model
    optimizer = workload.make_optimizer(model)
    step_one_by_one(optimizer, lambda: True)
    counter.note(_held(model), "weights")
    counter.note(shared.buckets, "communication")
    shared.watch(counter.note)

    def note(parameter: torch.Tensor) -> None:
        counter.note(shared.buckets, "communication")
        counter.note(shared.gradients([parameter]), "gradients")

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    kept: dict[str, object] = {}
    for _ in range(2):  # only the second step has optimizer states from its beginning
        counter.forget_peak()
        for last in [False, True][workload.accumulation == 1 :]:  # further passes add to what the first leaves
            shared.reduce_gradients(last)
            _pass(shared, spec, workload, counter, kept)
        counter.purpose = "workspace"
        shared.step(optimizer, counter.note)
        states = [local_part(leaf) for leaf in tree_leaves(list(optimizer.state.values())) if _is_tensor(leaf)]
        counter.note(states, "optimizer")
        optimizer.zero_grad()
        kept.clear()


def _pass(
    shared: SharedModel, spec: LayoutSpec, workload: TrainingWorkload, counter: LiveBytes, kept: dict[str, object]
) -> None:
    """Run one forward and backward pass; keep what a loop has in its variables until it is assigned again."""
    layout = spec.layout()
    sequence = workload.sequence
    counter.purpose = "batch"
    kept["inputs"] = inputs = workload.inputs(
        workload.batch // layout.replicas,
        None if sequence is None else sequence // spec.size("cp"),
        weights_dtype(spec, workload),
    )
    if isinstance(shared, PipelinedModel):
        shared.run(inputs, counter)
        return
    with shared.attend(sequence, counter):
        counter.purpose = "activations"
        args, kwargs = call_of(shared.model, inputs)
        kept["output"] = output = shared.model(*args, **kwargs)
        counter.note(_numbers(output), "logits")
        kept["loss"] = loss = workload.loss_of(output, inputs)
        counter.purpose = "workspace"
        loss.backward()  # type: ignore[no-untyped-call]
    counter.note(shared.gradients(), "gradients")


def _numbers(output: Any) -> list[torch.Tensor]:
    return [local_part(leaf) for leaf in tree_leaves(output) if _is_tensor(leaf) and leaf.is_floating_point()]


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
