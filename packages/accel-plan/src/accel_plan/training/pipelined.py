"""A model on one rank of a pipeline: cut, run and torn down by the code that trains, with other ranks left out."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from accel_core._records import record
from accel_core.mesh.spec import LayoutSpec
from accel_parallel.pipeline.kwargs import PipelineKwargs
from accel_parallel.pipeline.run import Pipeline
from accel_parallel.pipeline.stages import SPLIT_BACKWARD, Stages, lay_out
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_parallel.sharding.recomputing import recompute
from accel_plan._torch import without_votes
from accel_plan.live_bytes import LiveBytes
from accel_plan.training.sharing import SharedModel, weights_dtype
from accel_plan.training.workload import TrainingWorkload, call_of

_CPU = torch.device("cpu")


@record(frozen=True)
class PipelinePlan:
    """How a pipeline shares a model out.

    Attributes:
        blocks: For each stage, its first block and its last.
        ranks: For each stage, the rank along the axis that runs it.
        peaks: For each rank along the axis, the most bytes alive at once.
        at_peak: What they are for.
        bubble: The part of a step in which ranks wait, from 0 to 1, if all stages take as long.
    """

    schedule: str
    microbatches: int
    blocks: tuple[tuple[str, str], ...]
    ranks: tuple[int, ...]
    peaks: tuple[int, ...]
    at_peak: tuple[dict[str, int], ...]
    bubble: float


def plan_of(stages: Stages, schedule: str, found: Sequence[tuple[int, dict[str, int]]]) -> PipelinePlan:
    """Return how a pipeline shares a model out; of each rank along the axis, the peak and what it is for are known."""
    spans = [stages.span(stage) for stage in range(stages.count)]
    blocks = tuple((stages.blocks[first], stages.blocks[end - 1]) for first, end in spans)
    peaks, at_peak = zip(*found, strict=True)
    return PipelinePlan(schedule, stages.parts, blocks, stages.ranks, peaks, at_peak, bubble_of(stages, schedule))


class PipelinedModel(SharedModel):
    """A model of which a rank runs its stages, on one micro-batch after the other."""

    def __init__(
        self, model: nn.Module, spec: LayoutSpec, workload: TrainingWorkload, checkpointing: bool, mesh: DeviceMesh
    ) -> None:
        self.model, self.kept = model, {}
        self._spec, self._workload, self._mesh = spec, workload, mesh
        self._sharded = False  # the stages are, and reduce after the last micro-batch of each batch
        settings = settings_of(model, workload)
        stages = lay_out(model, settings, spec.size("pp"))
        self.pipeline = Pipeline(model, stages, settings, mesh.get_group("pp"), _CPU)
        own = [block for block in self.pipeline.blocks.values() if block not in self.pipeline.foreign]
        if workload.precision != "no":
            self._cast()
        if checkpointing:
            recompute(own, offload=False)
        if spec.engine == "fsdp":
            self._shard(own, FullyShardedDataParallelPlugin(fsdp_version=2), set())
        # Planned here, with values that take no memory: the plan looks at labels.
        like = workload.inputs(1, workload.sequence, weights_dtype(spec, workload))[:1]
        batch = like.expand(workload.batch // spec.layout().replicas, *like.shape[1:])
        self._step = self.pipeline.planned(model.forward, call_of(model, batch), True)
        self._schedule: Any = None

    def run(self, inputs: torch.Tensor, counter: LiveBytes) -> None:
        """Run all micro-batches of a batch forward and backward, and add their gradients to those that are there."""
        pipeline, step = self.pipeline, self._step
        step.parts[:] = [call_of(self.model, part) for part in torch.split(inputs, step.counts)]
        step.losses.clear()
        pipeline.step = step
        if self._schedule is None:
            pipeline.free(self.model)
            pipeline.keep_glue(step.flows[0])
            pipeline.stage_type = self._counted(counter)
            self._schedule = pipeline.scheduled(step)
        held = self._schedule.trained
        before = [each.grad for each in held]
        for parameter in held:
            parameter.grad = None
        counter.purpose = "communication"
        self._schedule.schedule.step(target=torch.zeros(pipeline.stages.parts), return_outputs=False)
        if step.failure is not None:
            raise step.failure
        pipeline.add_shared(self._schedule.shared)
        for parameter, gradient in zip(held, before, strict=True):
            if gradient is not None and parameter.grad is not None:
                gradient.add_(parameter.grad)
            parameter.grad = parameter.grad if gradient is None else gradient
        step.parts.clear()
        pipeline.step = None

    def _counted(self, counter: LiveBytes) -> type[Any]:
        """Return a class of stages that know their micro-batch, and say what their memory is for."""

        class Stage(without_votes(self.pipeline.stage_type)):  # type: ignore[misc]
            def forward_one_chunk(
                self, part: int, args: object, _: object = None, *rest: object, **more: object
            ) -> object:
                counter.purpose = "activations"
                result: object = super().forward_one_chunk(part, args, {"index": part}, *rest, **more)
                counter.purpose = "workspace"
                return result

        return Stage


def settings_of(model: nn.Module, workload: TrainingWorkload) -> PipelineKwargs:
    """Return how a model is cut, and how its loss is found: by itself, or from what it returns."""
    own = workload.loss is None and "labels" in call_of(model, workload.inputs(1, workload.sequence, None))[1]

    def loss_fn(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        return workload.loss_of(output, next(iter(batch.values())))

    return PipelineKwargs(workload.schedule, workload.microbatches, workload.split, None if own else loss_fn)


def bubble_of(stages: Stages, schedule: str) -> float:
    """Return the part of a step in which ranks wait, from 0 to 1, by the formulas of the schedules' papers.

    Of p ranks with m micro-batches and v stages each it is (p - 1) / (v m + p - 1): Huang et al., "GPipe" (2019), and
    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021). A third of the first and
    last micro-batch is left to wait for where gradients of weights fill the gaps: Qi et al., "Zero Bubble Pipeline
    Parallelism" (2024).
    """
    ranks = len(set(stages.ranks))
    ends = (ranks - 1) / (3 if schedule in SPLIT_BACKWARD else 1)
    return ends / (stages.parts * stages.count / ranks + ends)
