"""Arguments, plugins and environment in; a Runtime out. The only place where a run is decided.

Everything is checked here before anything is set up: a contradiction leaves no state behind. So the strategy's
class and the layout come first, which are arithmetic; then the processes meet, the mesh is laid out and the strategy is
made; the users' views are written last.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from accel_core._records import record
from accel_core.errors import ConfigurationError, expect, expect_flags
from accel_core.extension import Extension
from accel_core.host import environ
from accel_core.logging import get_logger
from accel_core.modules.held_memory import report_oom
from accel_core.optim.accumulation import Accumulation
from accel_core.options.engines import engines, load, require
from accel_core.options.enums import DynamoBackend, LoggerType, PrecisionType, RNGType
from accel_core.plugins.accumulation import GradientAccumulationPlugin
from accel_core.plugins.compilation import TorchDynamoPlugin
from accel_core.plugins.fp8 import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel_core.plugins.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    MeterKwargs,
    ProfileKwargs,
)
from accel_core.plugins.loading import DataLoaderConfiguration
from accel_core.plugins.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from accel_core.plugins.project import ProjectConfiguration
from accel_core.process import rendezvous
from accel_core.process.world import ensure
from accel_core.runtime import Runtime
from accel_core.state.gradient import GradientState
from accel_core.state.run import AcceleratorState, Decision, decided, resolve_precision
from accel_core.strategies import registry as strategies
from accel_core.strategies.parts import Parts, PrecisionRequest
from accel_core.strategies.strategy import Strategy
from accel_core.tracking.hub import TrackerHub
from accel_core.tracking.settings import TrackerKwargs
from accel_core.tracking.tracker import GeneralTracker

if TYPE_CHECKING:
    from accel_core.plugins.deepspeed import DeepSpeedPlugin
    from accel_core.plugins.fsdp import FullyShardedDataParallelPlugin
    from accel_core.plugins.megatron import MegatronLMPlugin

_logger = get_logger(__name__)


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"  # itself, in another process too


UNSET: Any = _Unset()
"""Stands for an argument that nobody gave."""

_RECIPES = (AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs)
_CONFIGURATIONS = {
    "dataloader_config": DataLoaderConfiguration,
    "dynamo_plugin": TorchDynamoPlugin,
    "gradient_accumulation_plugin": GradientAccumulationPlugin,
    "parallelism_config": ParallelismConfig,
    "project_config": ProjectConfiguration,
}
_PLUGINS = ("deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin")
_BUILT_IN = (
    *_RECIPES,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    MeterKwargs,
    ProfileKwargs,
    TrackerKwargs,
)

_METER = {"meter": "accel_core.metering:Meter"}


@record(frozen=True)
class Arguments:
    """The arguments of an Accelerator, in their order and with their defaults; see there for each."""

    device_placement: bool = True
    split_batches: bool = UNSET
    mixed_precision: PrecisionType | str | None = None
    gradient_accumulation_steps: int = 1
    cpu: bool = False
    dataloader_config: DataLoaderConfiguration | None = None
    deepspeed_plugin: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    torch_tp_plugin: TorchTensorParallelPlugin | None = None
    megatron_lm_plugin: MegatronLMPlugin | None = None
    rng_types: list[str | RNGType] | None = None
    log_with: str | LoggerType | GeneralTracker | list[str | LoggerType | GeneralTracker] | None = None
    project_dir: str | os.PathLike[str] | None = None
    project_config: ProjectConfiguration | None = None
    gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    step_scheduler_with_optimizer: bool = True
    kwargs_handlers: list[KwargsHandler] | None = None
    dynamo_backend: DynamoBackend | str | None = None
    dynamo_plugin: TorchDynamoPlugin | None = None
    deepspeed_plugins: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None
    parallelism_config: ParallelismConfig | None = None

    @property
    def plugins(self) -> dict[str, object]:
        """The plugins of engines that were given, by argument."""
        _refuse_both("DeepSpeed", deepspeed_plugin=self.deepspeed_plugin, deepspeed_plugins=self.deepspeed_plugins)
        plugins = {name: getattr(self, name) for name in _PLUGINS} | {
            "deepspeed_plugin": self.deepspeed_plugin if self.deepspeed_plugins is None else self.deepspeed_plugins
        }
        return {name: plugin for name, plugin in plugins.items() if plugin is not None}


def resolve(given: Arguments) -> tuple[Runtime, AcceleratorState]:
    """Decide how a run runs.

    Raises:
        ConfigurationError: Arguments that contradict each other or the environment.
        EngineUnavailableError: An engine that this version does not contain.
        MissingDependencyError: An engine whose package is not installed.
        DeviceUnavailableError: Hardware that is not here, or does not compute in the precision asked for.
    """
    _check_types(given)
    handlers = _handlers(given.kwargs_handlers)
    data = _data(given)
    window = _window(given)
    compilation = _compilation(given)
    place = rendezvous.locate()
    # A process group that exists counts, whatever the environment says.
    rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (place.rank, place.size)
    parallelism = _parallelism(given, processes)
    choice = _choice(given, handlers, processes, parallelism)
    plugin = next(iter(choice.plugins), None)
    precision = _precision(given, handlers, choice.strategy.decided_precision(plugin))
    layout = choice.strategy.lay_out(rank, processes, parallelism, plugin)
    needs = choice.strategy.group_needs(plugin)
    project = _project(given)

    # All contradictions were refused; from here on ranks meet.
    init = handlers.get("InitProcessGroupKwargs")
    world = ensure(given.cpu, needs, **(init.to_kwargs() if init is not None else {}))
    mesh = parallelism.get_device_mesh(world.device.type) if parallelism is not None and world.size > 1 else None
    strategy = choice.strategy(
        Parts(
            world=world,
            layout=layout,
            mesh=mesh,
            precision=precision,
            device_placement=given.device_placement,
            compilation=compilation,
            accumulation=Accumulation(GradientState(window)),
            data=data,
            plugins=choice.plugins,
            parallelism=parallelism,
        )
    )
    report_oom(world.device, world.rank)
    runtime = _wire(given, strategy, handlers, project)
    return runtime, _publish(given, runtime, choice, parallelism)


def arguments_now(given: Arguments, runtime: Runtime) -> Arguments:
    """Return the arguments with which an Accelerator runs as one does that lives."""
    parts = runtime.strategy.parts
    return replace(
        given,
        device_placement=parts.device_placement,
        split_batches=UNSET,
        mixed_precision=parts.precision.name,
        gradient_accumulation_steps=1,
        gradient_accumulation_plugin=GradientAccumulationPlugin(**runtime.gradient_state.plugin_kwargs),
        dataloader_config=parts.data,
        rng_types=runtime.rng_types,
        log_with=runtime.hub.log_with,
        project_dir=None,
        project_config=runtime.project,
        step_scheduler_with_optimizer=runtime.step_scheduler_with_optimizer,
        kwargs_handlers=list(runtime.handlers.values()),
        dynamo_backend=None,
        dynamo_plugin=parts.compilation,
    )


def _wire(given: Arguments, strategy: Strategy, handlers: dict[str, Any], project: ProjectConfiguration) -> Runtime:
    """Put a strategy and everything around it together."""
    parts = strategy.parts
    extensions = _extensions(handlers)
    runtime = Runtime(
        world=parts.world,
        strategy=strategy,
        gradient_state=parts.accumulation.gradient_state,
        accumulation=parts.accumulation,
        project=project,
        hub=TrackerHub(given.log_with, project.logging_dir, strategy.is_main, settings=handlers.get("TrackerKwargs")),
        handlers=handlers,
        rng_types=list(given.rng_types) if given.rng_types is not None else ["generator"],
        step_scheduler_with_optimizer=given.step_scheduler_with_optimizer,
    )
    runtime.extensions = [kind(runtime) for kind in extensions]
    runtime.gradient_state.extensions = runtime.extensions or runtime.gradient_state.extensions
    return runtime


def _extensions(handlers: dict[str, Any]) -> list[type[Extension]]:
    """Return what takes part in the run: what handlers ask for, or ACCELERATE_RUNTIME; loaded where asked for.

    Raises:
        ConfigurationError: No installed package has it.
    """
    wanted = {handler.extension: name for name, handler in handlers.items() if handler.extension}
    named = environ.text("ACCELERATE_RUNTIME")
    if named:
        wanted.setdefault(named, f"ACCELERATE_RUNTIME={named}")
    known = {engine.name: engine.extension for engine in engines().values()} if wanted.keys() - _METER.keys() else {}
    known = {name: path for name, path in known.items() if path} | _METER  # the meter is around all others
    for name, asked in wanted.items():
        if name not in known:
            raise ConfigurationError(
                f"What takes part in a run comes with an installed package; got {asked}, and installed are "
                f"{sorted(known)}. Install the package that has it, or leave it out."
            )
    return [load(path) for name, path in known.items() if name in wanted]


def _publish(
    given: Arguments, runtime: Runtime, choice: strategies.Choice, parallelism: ParallelismConfig | None
) -> AcceleratorState:
    """Show users what was decided: their views on the process and the run, and the variables that libraries read."""
    parts = runtime.strategy.parts
    known = decided() or Decision(None, parts.layout, "")
    flag = choice.flag if choice.flag and not environ.flag(choice.flag) else ""
    state = AcceleratorState(
        mixed_precision=parts.precision.name, cpu=given.cpu, dynamo_plugin=parts.compilation, _from_accelerator=True
    )
    argument, facts = choice.argument, {}
    if argument in given.plugins:  # users may name several, and keep their names
        facts = {argument: given.plugins[argument]}
    elif argument and getattr(state, argument, None) is None:
        facts = {argument: next(iter(choice.plugins), None)}
    state._publish(
        Decision(choice if choice.is_engine else known.engine, parts.layout, flag or known.flag),
        runtime.strategy.label(),
        (runtime.strategy.is_main, runtime.strategy.is_local_main) if runtime.strategy.main_rank else None,
        **facts,
        parallelism_config=parallelism,
        device_mesh=parts.mesh,
        backend=parts.world.backend,
    )
    if flag:
        environ.write(flag, "true")
    return state


def _handlers(given: Iterable[KwargsHandler] | None) -> dict[str, Any]:
    """Sort handlers by type name, refusing what is not a handler and what is there twice."""
    found: dict[str, Any] = {}
    single = type(given).__name__
    expect(not isinstance(given, KwargsHandler), given, "kwargs_handlers is a list", f"Write [{single}(...)].")
    for handler in given or []:
        fits = isinstance(handler, KwargsHandler)
        expect(fits, handler, "kwargs_handlers holds settings", "Write GradScalerKwargs(...), for example.")
        name = type(handler).__name__
        if not isinstance(handler, _RECIPES):  # a subclass counts as the kind that it extends
            name = next((kind.__name__ for kind in _BUILT_IN if isinstance(handler, kind)), name)
        if name in found:
            raise ConfigurationError(f"kwargs_handlers holds two {name}; give each kind of handler once.")
        found[name] = handler
    return found


def _refuse_both(what: str, **given: object) -> None:
    """Refuse two arguments that say the same thing."""
    if all(value is not None for value in given.values()):
        raise ConfigurationError(f"{what} was given twice: by {' and '.join(given)}. Give one of them.")


def _data(given: Arguments) -> DataLoaderConfiguration:
    split = None if given.split_batches is UNSET else bool(given.split_batches)
    _refuse_both("Splitting batches", split_batches=split, dataloader_config=given.dataloader_config)
    return given.dataloader_config or DataLoaderConfiguration(split_batches=bool(split))


def _window(given: Arguments) -> GradientAccumulationPlugin:
    steps = None if given.gradient_accumulation_steps == 1 else given.gradient_accumulation_steps
    plugin = given.gradient_accumulation_plugin
    _refuse_both("Gradient accumulation", gradient_accumulation_steps=steps, gradient_accumulation_plugin=plugin)
    if plugin is not None:
        return plugin
    from_environment = environ.integer("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    if steps is not None and from_environment not in (None, steps):
        _logger.warning(
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=%s is not used; the script passes gradient_accumulation_steps=%s. "
            "Leave one of them out.",
            *(from_environment, steps),
        )
    found = steps if steps is not None else from_environment
    return GradientAccumulationPlugin(num_steps=1 if found is None else found)


def _compilation(given: Arguments) -> TorchDynamoPlugin:
    _refuse_both("Compilation", dynamo_backend=given.dynamo_backend, dynamo_plugin=given.dynamo_plugin)
    return given.dynamo_plugin or TorchDynamoPlugin(backend=given.dynamo_backend)  # type: ignore[arg-type]


def _precision(given: Arguments, handlers: dict[str, Any], of_engine: str | None) -> PrecisionRequest:
    return PrecisionRequest(
        resolve_precision(given.mixed_precision, given.cpu, of_engine),
        handlers.get("AutocastKwargs") or AutocastKwargs(),
        handlers.get("GradScalerKwargs") or GradScalerKwargs(),
        tuple(handler for handler in handlers.values() if isinstance(handler, _RECIPES)),
    )


def _project(given: Arguments) -> ProjectConfiguration:
    project = given.project_config or ProjectConfiguration()
    if given.project_dir is not None and project.project_dir is None:
        project.set_directories(os.fspath(given.project_dir))
    return project


def _parallelism(given: Arguments, processes: int) -> ParallelismConfig | None:
    """Return the axes of the mesh: those given, those of the run that is set up, or those of the environment.

    Raises:
        ConfigurationError: A plugin of tensor parallel has another size than the axes, or one that does not divide the
            number of processes.
    """
    found: ParallelismConfig | None = given.parallelism_config
    if found is None:
        found = AcceleratorState._shared_state.get("parallelism_config")
    if found is None and environ.flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        found = ParallelismConfig()
    size = max((getattr(each, "tp_size", 1) for each in given.plugins.values()), default=1)
    if size == 1:
        return found
    if found is None and processes % size == 0:
        return ParallelismConfig(tp_size=size, dp_replicate_size=processes // size)
    if found is None or found.tp_size != size:
        raise ConfigurationError(
            "The size of torch_tp_plugin is that of the axis for tensor parallel, and divides the number of processes; "
            f"got tp_size={size}, {'no axes' if found is None else found.sizes} and {processes} processes. "
            "Use ParallelismConfig(tp_size=...) alone."
        )
    return found


def _choice(
    given: Arguments, handlers: dict[str, Any], processes: int, parallelism: ParallelismConfig | None
) -> strategies.Choice:
    """Choose the strategy: by the plugins given, else the engine of the run that is set up, else by the environment.

    Raises:
        ConfigurationError: The axes of the mesh do not fit, or the process trains with another engine already.
    """
    if parallelism is not None and parallelism.total_size not in (1, processes):
        raise ConfigurationError(
            f"The axes of parallelism_config multiply to the number of processes; got {parallelism.total_size} and "
            f"{processes} processes. Change a size, or the number of processes."
        )
    shown = AcceleratorState._shared_state
    known = decided()
    settled = known.engine if known is not None and isinstance(known.engine, strategies.Choice) else None
    plugins = _engine_plugins(given, handlers)
    if not plugins and settled is not None:
        return settled
    if not plugins:
        plugins = _listed(*(shown.get(name) for name in AcceleratorState._plugin_attributes))
    settings = _listed(handlers.get("DistributedDataParallelKwargs"))
    choice = strategies.choose(strategies.Request(processes, (*plugins, *settings), parallelism, given.cpu))
    if parallelism is not None and parallelism.sp_enabled and choice.strategy.name != parallelism.sp_backend:
        raise ConfigurationError(
            f"Sequence parallel is done by the engine {parallelism.sp_backend!r}; got sp_size={parallelism.sp_size} "
            f"and the engine {choice.strategy.name!r}. Pass that engine's plugin, or leave sp_size at 1."
        )
    if settled is not None and choice.strategy is not settled.strategy:
        raise ConfigurationError(
            f"This process already trains with the engine {settled.strategy.name!r}; {choice.strategy.name!r} was "
            "asked for. Use one engine for all Accelerators, or train in another process."
        )
    return choice


def _check_types(given: Arguments) -> None:
    """Refuse plain values in the place of a configuration, which would be ignored, or fail later on."""
    fits = not isinstance(given.device_placement, str)
    expect(fits, given.device_placement, "device_placement is True or False", "Pass cpu=True to compute on the CPU.")
    expect_flags(Arguments, {name: value for name, value in vars(given).items() if value is not UNSET})
    for each in given.rng_types or []:
        RNGType(each)  # raises
    kinds = {name: kind.__name__ for name, kind in _CONFIGURATIONS.items()}
    if given.plugins:
        kinds |= {engine.argument: engine.plugin.partition(":")[2] for engine in engines().values()}
    for name, kind in kinds.items():
        value = getattr(given, name, given.plugins.get(name))
        # Some engines take several plugins by name.
        held = value.values() if name in given.plugins and isinstance(value, dict) and value else [value]
        fits = not any(isinstance(each, str | int | float | list | tuple | dict | type) for each in held)
        expect(fits, value, f"{name} takes a {kind}", f"Write {name}={kind}(...).")


def _engine_plugins(given: Arguments, handlers: dict[str, Any]) -> tuple[Any, ...]:
    """Return the plugins that were passed: as arguments, and third parties' among the handlers."""
    for argument in given.plugins:
        require(argument.removesuffix("_plugin"), f"the argument {argument}")
    foreign = [each for each in handlers.values() if not isinstance(each, _BUILT_IN) and not each.extension]
    return _listed(*given.plugins.values(), *foreign)


def _listed(*plugins: object) -> tuple[Any, ...]:
    """Return the plugins that are there; those given by name one by one."""
    found: list[Any] = []
    for plugin in plugins:
        found += plugin.values() if isinstance(plugin, dict) else [] if plugin is None else [plugin]
    return tuple(found)
