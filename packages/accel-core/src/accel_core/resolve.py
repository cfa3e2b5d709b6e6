"""Arguments, plugins and environment in; a Runtime out. The only place where a run is decided.

Everything is checked here before anything is set up: a combination that cannot be meant leaves no state behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from accel_core._records import record
from accel_core.errors import ConfigurationError
from accel_core.host import environ
from accel_core.optim.accumulation import Accumulation
from accel_core.options.enums import DynamoBackend, PrecisionType, RNGType
from accel_core.plugins.accumulation import GradientAccumulationPlugin
from accel_core.plugins.compilation import TorchDynamoPlugin
from accel_core.plugins.fp8 import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel_core.plugins.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from accel_core.plugins.loading import DataLoaderConfiguration
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.plugins.project import ProjectConfiguration
from accel_core.precision import registry as precisions
from accel_core.process import rendezvous, world
from accel_core.runtime import Handlers, Runtime
from accel_core.state.gradient import GradientState
from accel_core.state.run import AcceleratorState
from accel_core.strategies import registry as strategies
from accel_core.strategies.strategy import Parts
from accel_core.tracking.hub import TrackerHub
from accel_core.tracking.settings import TrackerKwargs

__all__ = ["UNSET", "Arguments", "resolve"]

UNSET: Any = object()
"""Stands for an argument that nobody gave."""

_RECIPES = (AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs)
_BUILT_IN = (
    *_RECIPES,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    TrackerKwargs,
)


@record(frozen=True)
class Arguments:
    """What the constructor of an Accelerator was given, word for word; see there for the meaning of each."""

    device_placement: bool
    split_batches: Any
    mixed_precision: PrecisionType | str | None
    gradient_accumulation_steps: int
    cpu: bool
    dataloader_config: DataLoaderConfiguration | None
    deepspeed_plugin: Any
    fsdp_plugin: Any
    torch_tp_plugin: Any
    megatron_lm_plugin: Any
    rng_types: list[str | RNGType] | None
    log_with: Any
    project_dir: str | os.PathLike[str] | None
    project_config: ProjectConfiguration | None
    gradient_accumulation_plugin: GradientAccumulationPlugin | None
    step_scheduler_with_optimizer: bool
    kwargs_handlers: list[KwargsHandler] | None
    dynamo_backend: DynamoBackend | str | None
    dynamo_plugin: TorchDynamoPlugin | None
    parallelism_config: Any


def resolve(given: Arguments) -> tuple[Runtime, AcceleratorState]:
    """Decide how a run runs.

    Args:
        given: What the user asked for.

    Returns:
        The wired parts, and the users' view on them.

    Raises:
        ConfigurationError: Arguments that contradict each other or the environment.
        EngineUnavailableError: An engine that this version does not contain.
        DeviceUnavailableError: Hardware that is not here, or does not compute in the precision asked for.
    """
    handlers = _handlers(given.kwargs_handlers)
    data = _data(given)
    window = _window(given)
    compilation = _compilation(given)
    precision_name = _precision_name(given)
    chosen = strategies.choose(_request(given, handlers))
    project = _project(given)
    tracker_settings = handlers.get("TrackerKwargs")

    init = handlers.get("InitProcessGroupKwargs")
    state = AcceleratorState(
        mixed_precision=precision_name,
        cpu=given.cpu,
        dynamo_plugin=compilation,
        deepspeed_plugin=given.deepspeed_plugin,
        fsdp_plugin=given.fsdp_plugin,
        torch_tp_plugin=given.torch_tp_plugin,
        megatron_lm_plugin=given.megatron_lm_plugin,
        parallelism_config=_mesh(given),
        _from_accelerator=True,
        **(init.to_kwargs() if init is not None else {}),
    )
    here = world.ensure()
    autocast = handlers.get("AutocastKwargs") or AutocastKwargs()
    precision = precisions.choose(
        state.mixed_precision,
        here,
        autocast,
        handlers.get("GradScalerKwargs") or GradScalerKwargs(),
        [handler for handler in handlers.values() if isinstance(handler, _RECIPES)],
    )
    strategy = chosen(
        Parts(
            world=here,
            precision=precision,
            device_placement=given.device_placement,
            compilation=compilation,
            ddp=handlers.get("DistributedDataParallelKwargs") or DistributedDataParallelKwargs(),
            plugin=_plugin_of(chosen, given, handlers),
        )
    )
    state._label(strategy.label())
    if state.parallelism_config is not None and here.size > 1:
        state.device_mesh = state.parallelism_config.build_device_mesh(here.device.type)
    gradient_state = GradientState(window)
    runtime = Runtime(
        world=here,
        strategy=strategy,
        precision=precision,
        gradient_state=gradient_state,
        accumulation=Accumulation(gradient_state),
        data=data,
        project=project,
        hub=TrackerHub(given.log_with, project.logging_dir, here.is_main, settings=tracker_settings),
        handlers=Handlers(given=handlers, autocast=autocast, profile=handlers.get("ProfileKwargs") or ProfileKwargs()),
        rng_types=list(given.rng_types) if given.rng_types is not None else ["generator"],
        device_placement=given.device_placement,
        step_scheduler_with_optimizer=given.step_scheduler_with_optimizer,
    )
    return runtime, state


def _handlers(given: Iterable[KwargsHandler] | None) -> dict[str, Any]:
    """Sort handlers by type name, refusing what is no handler and what is there twice."""
    found: dict[str, Any] = {}
    for handler in given or []:
        if not isinstance(handler, KwargsHandler):
            raise ConfigurationError(
                f"kwargs_handlers takes objects such as DistributedDataParallelKwargs; got {type(handler).__name__}. "
                "Pass instances of the handler classes."
            )
        name = type(handler).__name__
        if not isinstance(handler, _RECIPES):
            name = next((kind.__name__ for kind in _BUILT_IN if isinstance(handler, kind)), name)
        if name in found:
            raise ConfigurationError(f"kwargs_handlers holds two {name}; give each kind of handler once.")
        found[name] = handler
    return found


def _data(given: Arguments) -> DataLoaderConfiguration:
    if given.split_batches is UNSET:
        return given.dataloader_config or DataLoaderConfiguration()
    if given.dataloader_config is not None:
        raise ConfigurationError(
            "split_batches was given twice: as an argument and in dataloader_config. Give it in dataloader_config only."
        )
    return DataLoaderConfiguration(split_batches=bool(given.split_batches))


def _window(given: Arguments) -> GradientAccumulationPlugin:
    steps = given.gradient_accumulation_steps
    if given.gradient_accumulation_plugin is not None:
        if steps != 1:
            raise ConfigurationError(
                f"Gradient accumulation was given twice: gradient_accumulation_steps={steps} and a plugin. Give one."
            )
        return given.gradient_accumulation_plugin
    if not isinstance(steps, int) or steps < 1:
        raise ConfigurationError(
            f"gradient_accumulation_steps must be a whole number of at least 1; got {steps!r}. "
            "Use 1 to step on every batch."
        )
    from_environment = environ.integer("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    return GradientAccumulationPlugin(num_steps=steps if steps != 1 or from_environment is None else from_environment)


def _compilation(given: Arguments) -> TorchDynamoPlugin:
    if given.dynamo_plugin is not None:
        if given.dynamo_backend is not None:
            raise ConfigurationError("Compilation was given twice: dynamo_backend and dynamo_plugin. Give one.")
        return given.dynamo_plugin
    if given.dynamo_backend is not None:
        return TorchDynamoPlugin(backend=given.dynamo_backend)  # type: ignore[arg-type]
    return TorchDynamoPlugin()


def _precision_name(given: Arguments) -> str | None:
    if given.mixed_precision is None:
        return None
    name = str(given.mixed_precision).lower()
    if name not in PrecisionType:
        raise ConfigurationError(f"Unknown mixed precision {name!r}. Use one of {PrecisionType.list()}.")
    return name


def _project(given: Arguments) -> ProjectConfiguration:
    project = given.project_config or ProjectConfiguration()
    if given.project_dir is not None and project.project_dir is None:
        project.set_directories(os.fspath(given.project_dir))
    return project


def _request(given: Arguments, handlers: dict[str, Any]) -> strategies.Request:
    processes = dist.get_world_size() if dist.is_initialized() else rendezvous.locate().size
    mesh = _mesh(given)
    if mesh is not None and mesh.total_size not in (1, processes):
        raise ConfigurationError(
            f"The axes of parallelism_config multiply to {mesh.total_size} processes, and this run has {processes}. "
            "Change a size, or the number of processes."
        )
    return strategies.Request(
        processes=processes,
        deepspeed=given.deepspeed_plugin,
        fsdp=given.fsdp_plugin,
        megatron=given.megatron_lm_plugin,
        tensor_parallel=given.torch_tp_plugin,
        mesh=mesh,
        others=tuple(handler for handler in handlers.values() if not isinstance(handler, _BUILT_IN)),
    )


def _mesh(given: Arguments) -> Any:
    """Return the axes of the mesh: those given, or those of the environment where it asks for them."""
    if given.parallelism_config is None and environ.flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return ParallelismConfig()
    return given.parallelism_config


def _plugin_of(strategy: type, given: Arguments, handlers: dict[str, Any]) -> Any:
    """Return the plugin made for a third party's strategy, if one was given."""
    wanted = getattr(strategy, "plugin_type", None)
    if wanted is None:
        return None
    return next((handler for handler in handlers.values() if isinstance(handler, wanted)), None)
