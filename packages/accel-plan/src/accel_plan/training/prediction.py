"""The memory of a training step on one rank of a layout, found by running the step on tensors without memory."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from accel_core._records import record
from accel_core._torch import fake_mode
from accel_core.errors import AccelError, ConfigurationError
from accel_core.mesh.spec import LayoutSpec
from accel_core.mesh.tensor import local_part
from accel_parallel.sharding.loading import Empty
from accel_parallel.sharding.optimizer_step import step_one_by_one
from accel_plan._torch import tree_leaves
from accel_plan.live_bytes import LiveBytes
from accel_plan.training.pipelined import PipelinedModel, PipelinePlan, plan_of
from accel_plan.training.sharing import SharedModel, check_layout, laid_out, weights_dtype
from accel_plan.training.workload import TrainingWorkload
from accel_plan.training.zero import ZeroShare

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
    largest, shared = max(found, key=lambda each: each[0].peak)
    if not isinstance(shared, PipelinedModel):
        return largest
    plan = plan_of(shared.pipeline.stages, workload.schedule, [(each.peak, each.at_peak) for each, _ in found])
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
) -> tuple[TrainingMemory, SharedModel]:
    model = _made(make_model, weights_dtype(spec, workload), mode := fake_mode())
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigurationError(
            f"A training step trains parameters; got a {type(model).__name__}, none of whose parameters requires a "
            "gradient. Unfreeze those that you train."
        )
    with laid_out(spec, rank) as mesh:
        counter = LiveBytes("weights", mode)
        with _traced(model):
            # Meshes are laid out here, whose numbers are read: not in the mode.
            if mesh is not None and spec.size("pp") > 1:
                shared: SharedModel = PipelinedModel(model.train(), spec, workload, checkpointing, mesh)
            else:
                shared = SharedModel(model.train(), spec, workload, checkpointing, mesh)
            with mode, counter:
                _run(shared, spec, workload, counter)
    at_peak, most = (
        {purpose: each.get(purpose, 0) for purpose in PURPOSES} for each in (counter.at_peak, counter.most)
    )
    return TrainingMemory(spec.name, spec.ranks, checkpointing, counter.peak, at_peak, most), shared


def _made(
    make_model: Callable[[], nn.Module], dtype: torch.dtype | None, mode: AbstractContextManager[Any]
) -> nn.Module:
    """Make a model whose tensors are on a device, without memory there; ties stay."""
    model = make_model().to("meta", dtype)
    with mode:
        return model.apply(Empty(torch.device("cpu")))


def _run(shared: SharedModel, spec: LayoutSpec, workload: TrainingWorkload, counter: LiveBytes) -> None:
    """Run a training step that has optimizer states, which the step before it makes."""
    model = shared.model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    counter.note([local_part(tensor.detach()) for tensor in (*model.parameters(), *model.buffers())], "weights")
    # `DistributedDataParallel` has buckets for all gradients, in addition to the gradients.
    buckets = [torch.empty_like(parameter) for parameter in trained if spec.engine == "ddp"]
    counter.note(buckets, "communication")
    optimizer = workload.make_optimizer(model)
    step_one_by_one(optimizer, lambda: True)
    zero = None
    if spec.zero_stage is not None:
        zero = ZeroShare(model, optimizer, spec, workload.reduce_bucket, counter)

    def note(*parameters: nn.Parameter) -> None:
        counter.note([local_part(each.grad) for each in parameters if each.grad is not None], "gradients")

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    for _ in range(2):  # only the second step has optimizer states from its beginning
        counter.forget_peak()
        for last in [False, True][workload.accumulation == 1 :]:  # further passes add to what the first leaves
            shared.reduce_gradients(last)
            counter.purpose = "batch"
            inputs = _inputs(spec, workload)
            with nullcontext() if zero is None else zero.passing():
                shared.run(inputs, counter)
            note(*trained)
        counter.purpose = "workspace"
        optimizer.step()
        states = [
            local_part(leaf) for leaf in tree_leaves([*optimizer.state.values()]) if isinstance(leaf, torch.Tensor)
        ]
        counter.note(states, "optimizer")
        optimizer.zero_grad()
        shared.kept.clear()
        del inputs


def _inputs(spec: LayoutSpec, workload: TrainingWorkload) -> torch.Tensor:
    """Return what one rank reads of a batch."""
    samples = workload.batch // spec.layout().replicas
    sequence = None if workload.sequence is None else workload.sequence // spec.size("cp")
    return workload.inputs(samples, sequence, weights_dtype(spec, workload))
