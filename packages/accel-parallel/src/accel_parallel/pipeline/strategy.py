"""Pipeline parallel as a strategy: each rank of the axis "pp" holds some blocks of a model."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from accel_core._torch import has_gradient_hooks
from accel_core.checkpoint.tensor_file import SpreadWeight
from accel_core.comm.control import Channel
from accel_core.errors import ConfigurationError, EngineUnavailableError, PreparationError
from accel_core.host.versions import require_torch
from accel_core.mesh.tensor import whole
from accel_core.modules import empty
from accel_core.modules.unwrap import canonical_name
from accel_core.optim.optimizer import Stepper
from accel_core.options.enums import DynamoBackend
from accel_core.precision.precision import Precision
from accel_core.strategies import recipe
from accel_core.strategies.parts import Clip, Parts, PrecisionRequest
from accel_parallel.fsdp2.in_place import reshard
from accel_parallel.mesh.strategy import MeshStrategy
from accel_parallel.pipeline.format import PipelinedFormat
from accel_parallel.pipeline.kwargs import PipelineKwargs
from accel_parallel.pipeline.run import Pipeline
from accel_parallel.pipeline.stages import SPLIT_BACKWARD, Stages, lay_out
from accel_parallel.sharding import gradients
from accel_parallel.sharding.loading import has_no_values, receive, refuse_empty, starts_from_main
from accel_parallel.sharding.refusals import refuse_calls, refuse_copies, refuse_gloo, refuse_resizing


class PipelineStrategy(MeshStrategy):
    """Ranks along "pp" run the stages of each batch; copies of the pipeline average gradients."""

    name = "pipeline"
    plugin_type = PipelineKwargs
    combines = ("pp",)
    receives_weights = True
    shards: ClassVar[bool] = False
    """Whether blocks are sharded besides."""

    def __init__(self, parts: Parts) -> None:
        require_torch("pipelines")
        refuse_gloo(parts.world)
        given = [plugin for plugin in parts.plugins if isinstance(plugin, PipelineKwargs)]
        self.settings = given[0] if given else PipelineKwargs()
        self._pipelines: MutableMapping[torch.nn.Module, Pipeline] = WeakIdKeyDictionary()
        compiled = parts.compilation.backend != DynamoBackend.NO
        if compiled and (not parts.compilation.use_regional_compilation or self.settings.schedule in SPLIT_BACKWARD):
            raise ConfigurationError(
                "In a pipeline blocks are compiled one by one, and not where a schedule computes gradients of inputs "
                f"and of weights apart; got dynamo_backend={parts.compilation.backend} and schedule="
                f"{self.settings.schedule!r}. Use TorchDynamoPlugin(use_regional_compilation=True) and '1f1b'."
            )
        super().__init__(parts)
        mesh = parts.mesh
        assert mesh is not None  # the axis has two ranks or more
        self.group: dist.ProcessGroup = mesh.get_group("pp")
        self.format = PipelinedFormat(self.pipeline_of)

    @property
    def _spreads(self) -> bool:
        return True

    @property
    def mixes(self) -> bool:
        """Whether blocks are sharded, and the rest whole."""
        return self.shards

    def precision(self, asked: PrecisionRequest) -> Precision:
        """Return the number format; refuse fp8, whose scales are one for all ranks."""
        if asked.name == "fp8":
            raise EngineUnavailableError(
                "The layers of fp8 have scales that all ranks share, and stages run at other times; got "
                "mixed_precision='fp8'. Use 'bf16', 'fp16' or 'no'."
            )
        return super().precision(asked)

    def plan(self, model: torch.nn.Module) -> Any:
        """Return how a model will be cut into stages; refuse one that cannot be."""
        bare = self._bare(model)
        if self.is_prepared(bare):
            return None
        super().plan(model)
        hooked = [name for name, each in bare.named_parameters() if has_gradient_hooks(each)]
        sparse = [name for name, each in bare.named_modules() if getattr(each, "sparse", False)]
        if hooked or sparse:
            raise PreparationError(
                "Gradients of a pipeline add up over micro-batches, densely; got hooks on, or sparse gradients of, "
                f"{', '.join([*hooked, *sparse][:3])}. Change gradients after backward(), and set sparse=False."
            )
        if recipe.inside(model) is not model:
            raise PreparationError(
                f"A pipeline cuts a model between its blocks, which compiling joins; got a compiled "
                f"{type(bare).__name__}. Pass TorchDynamoPlugin(use_regional_compilation=True) instead."
            )
        return lay_out(bare, self.settings, self.group.size())

    def place(self, model: torch.nn.Module) -> None:
        """Free what other ranks hold, and move the rest to the device."""
        self._cut(self._bare(model))
        super().place(model)

    def split(self, model: torch.nn.Module) -> torch.nn.Module:
        """Free what other ranks hold, and show the rest alone in state dicts."""
        bare = self._bare(model)
        self._cut(bare)
        pipeline = self.pipeline_of(bare)
        bare.register_state_dict_post_hook(partial(_leave_out, pipeline))  # type: ignore[no-untyped-call]
        bare.register_load_state_dict_pre_hook(partial(_refuse_others, pipeline))  # type: ignore[no-untyped-call]
        refuse_resizing(bare)
        refuse_copies(bare)
        if hasattr(bare, "generate"):
            refuse_calls(
                bare,
                "generate",
                "A pipeline does not generate: each token would pass through all ranks, with caches on them; got "
                f"generate() of a prepared {type(bare).__name__}. Save the model by accelerator.save_model, and load "
                "it on one device.",
            )
        return model

    def _cut(self, model: torch.nn.Module) -> None:
        if model in self._pipelines:
            return
        stages: Stages = self.plans[model]
        channel = Channel(self.world, "prepare: empty")
        found = channel.exchange((has_no_values(model), empty.seed_of(model)))
        is_empty = all(without for without, _ in found)
        if not is_empty or any(seed is not None for _, seed in found):
            refuse_empty(model, self.world)
        from_main = not is_empty and starts_from_main(model, self.world, asked=False)
        pipeline = Pipeline(model, stages, self.settings, self.group, self.world.device)
        pipeline.scaler = self.number_format.scaler
        if is_empty:
            with channel.together("Giving stages memory"):
                pipeline.make()
        if from_main:
            inside = {id(part) for block in pipeline.blocks.values() for part in block.modules()}
            for block in pipeline.blocks.values():  # so that no rank has more than one block beyond its own
                receive(block.modules(), self.world.device)
                pipeline.free(block)
            receive((each for each in model.modules() if id(each) not in inside), self.world.device)
        pipeline.free(model)
        self._pipelines[model] = pipeline

    def pipeline_of(self, model: torch.nn.Module) -> Pipeline:
        """Return the pipeline that runs a prepared model."""
        return self._pipelines[self._bare(model)]

    def held(self, model: torch.nn.Module, *, buffers: bool = False) -> list[torch.Tensor]:
        """Return what this rank holds of its stages; see `Strategy.held`.

        Raises:
            EngineUnavailableError: Buffers are asked for, of which ranks may hold different values.
        """
        if buffers:
            raise EngineUnavailableError(
                "Ranks of a pipeline keep the buffers of their own stages; got buffers='average'. Leave it out: the "
                "model then has its own buffers under the average."
            )
        reshard(self._bare(model))
        elsewhere = self.pipeline_of(model).elsewhere
        return [each for each in super().held(model) if id(each) not in elsewhere]

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        """Run the pipeline where the model is called, from now on, and average gradients over copies of it."""
        super().distribute(model)
        self.pipeline_of(model).start()
        return model

    def stepper(self, optimizer: torch.optim.Optimizer) -> Stepper | None:
        """Also let go of the state of parameters that turned out to be other ranks'."""

        def forget(*_: object) -> None:
            elsewhere = set[int]().union(*(each.elsewhere for each in self._pipelines.values()))
            for parameter in [each for each in optimizer.state if id(each) in elsewhere]:
                del optimizer.state[parameter]

        optimizer.register_step_pre_hook(forget)
        return super().stepper(optimizer)

    def clip_grad_norm_(self, clip: Clip) -> torch.Tensor:
        """Scale gradients down to a norm over all stages; returns a plain scalar, equal on all ranks."""
        given = self._names.trained(clip.parameters)
        pipelines = list(self._pipelines.values())
        counted = [each for each in given if all(one.counted(each) for one in pipelines)]
        return gradients.clip_norm(
            given, clip.limit, clip.norm_type, counted=counted, across=self.group, device=self.world.device
        )

    def weights(self, model: torch.nn.Module) -> Iterable[tuple[str, Any]]:
        """Yield the names and weights that `save_model` writes; the rank that holds one sends it to the others."""
        pipeline = self.pipeline_of(model)
        tensors, made = pipeline.tensors(), dict[int, SpreadWeight]()
        for name, value in pipeline.whole_state().items():
            if name in tensors:
                gather = partial(self.whole_of, tensors[name], value)
                value = made.setdefault(id(tensors[name]), SpreadWeight(tuple(value.shape), value.dtype, gather))
            yield canonical_name(name), value

    def state_dict(self, model: torch.nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole model's state on every rank."""
        return {name: value() if isinstance(value, SpreadWeight) else value for name, value in self.weights(model)}

    @torch.no_grad()
    def whole_of(self, parameter: torch.Tensor, value: torch.Tensor | None) -> Any:
        """Return whole what belongs to a parameter of this pipeline; the rank that holds it sends it to the others."""
        found = ((each.group, each.source(parameter)) for each in self._pipelines.values())
        group, source = next((one for one in found if one[1] is not None), (None, None))
        if source is None:
            return super().whole_of(parameter, value)
        own = self.world.rank == source
        there = torch.tensor([value is not None], device=self.world.device)
        dist.broadcast(there, source, group=group)
        if not there:
            return None
        held = (
            whole(value.detach()) if own and value is not None else torch.empty(parameter.shape, dtype=parameter.dtype)
        )
        held = held.to(self.world.device).contiguous()
        dist.broadcast(held, source, group=group)
        return held


def _leave_out(
    pipeline: Pipeline, model: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: object
) -> None:
    """Leave out of a state dict what other ranks hold."""
    if not pipeline.shows_whole:
        for name, tensor in pipeline.tensors().items():
            if id(tensor) in pipeline.elsewhere:
                state.pop(prefix + name, None)


def _refuse_others(
    pipeline: Pipeline, model: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: object
) -> None:
    """Refuse to load what other ranks hold."""
    others = [n for n, each in pipeline.tensors().items() if id(each) in pipeline.elsewhere and prefix + n in state]
    if others:
        raise PreparationError(
            "A rank of a pipeline holds some layers of its model; got a state dict with those of others: "
            f"{', '.join(others[:3])}. Load it before prepare(), or call accelerator.load_state."
        )
