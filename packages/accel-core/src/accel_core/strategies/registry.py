"""Which strategy a run uses: the first row that claims it.

Claims are decided before a strategy is imported. A third party adds a strategy through the entry-point group
`accel.strategies`, or in a process by `register_strategy`; it is chosen by the type of its own plugin, or by its name
in ACCELERATE_STRATEGY.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from accel_core._records import record
from accel_core.checkpoint.formats import register_format
from accel_core.devices import registry as devices
from accel_core.errors import ConfigurationError
from accel_core.host import environ
from accel_core.modules.unwrap import register_container
from accel_core.plugins.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from accel_core.strategies.strategy import Strategy
from accel_core.strategies.xla import WRAPPERS

__all__ = ["ORDER", "Choice", "Request", "Row", "choose", "register_strategy"]


@record(frozen=True)
class Request:
    """What was asked for, before any strategy exists.

    Attributes:
        processes: Number of processes.
        plugins: Everything that was given and configures a strategy, built in or not.
        parallelism: The axes of the mesh, or `None`.
        cpu: Whether the run computes on the CPU whatever hardware is here.
    """

    processes: int
    plugins: tuple[Any, ...] = ()
    parallelism: ParallelismConfig | None = None
    cpu: bool = False


@record(frozen=True)
class Row:
    """One built-in way to run.

    Attributes:
        name: Its name.
        home: `module:Class`, or what returns it for the engine's plugin.
        plugin: `module:Class` of its plugin; giving one claims the run.
        flag: Variable that claims the run in the plugin's stead; set where a plugin claimed it.
        shown_as: Attribute of `AcceleratorState` by which users find the plugin.
        claims: Says, from the request alone, whether it is the one; `None` leaves that to plugin and flag.
        containers: `module:Class` of the wrappers that the engine puts around models.
        formats: `module:name` of the forms that its checkpoints have, so that every strategy can read them.
    """

    name: str
    home: str | Callable[[Any], str]
    plugin: str = ""
    flag: str = ""
    shown_as: str = ""
    claims: Callable[[Request], bool] | None = None
    containers: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()

    def of(self, plugins: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the plugins that belong to this row."""
        module, _, name = self.plugin.partition(":")
        if module not in sys.modules:  # nobody can have made a plugin whose module was never imported
            return ()
        kind: type = getattr(sys.modules[module], name)
        return tuple(plugin for plugin in plugins if isinstance(plugin, kind))


@record(frozen=True)
class Choice:
    """The strategy of a run.

    Attributes:
        strategy: Its class.
        plugins: Its plugins, made from the environment where none was given.
        flag: Variable that tells other libraries of the engine; empty for a strategy that has none.
        shown_as: Attribute of `AcceleratorState` by which users find the plugin; empty for a strategy that has none.
        is_engine: Whether it was asked for by plugin, variable or name, not just by the number of processes.
    """

    strategy: type[Strategy]
    plugins: tuple[Any, ...]
    flag: str = ""
    shown_as: str = ""
    is_engine: bool = True


def _needs_mesh(request: Request) -> bool:
    """Return whether the request asks for more than plain data parallelism."""
    axes = request.parallelism
    if any(isinstance(plugin, TorchTensorParallelPlugin) for plugin in request.plugins):
        return True
    return axes is not None and (axes.non_data_parallel_size > 1 or axes.dp_shard_enabled)


def _on_xla(request: Request) -> bool:
    """Return whether the run uses XLA devices, which come first if torch_xla is installed."""
    if request.cpu or environ.flag("ACCELERATE_USE_CPU"):
        return False
    wanted = environ.text("ACCELERATE_TORCH_DEVICE")
    return wanted.startswith("xla") if wanted else devices.named("xla").is_available()


def _fsdp(plugin: Any) -> str:
    """Return the strategy of the requested FSDP version."""
    if plugin.fsdp_version == 2:
        return "accel_core.strategies.fsdp2.strategy:FullyShardStrategy"
    return "accel_core.strategies.fsdp1.strategy:FullyShardedWrapperStrategy"


ORDER: tuple[Row, ...] = (
    Row(
        "megatron",
        "accel_core.strategies.megatron.strategy:MegatronStrategy",
        plugin="accel_core.plugins.megatron:MegatronLMPlugin",
        flag="ACCELERATE_USE_MEGATRON_LM",
        shown_as="megatron_lm_plugin",
    ),
    Row(
        "deepspeed",
        "accel_core.strategies.deepspeed.strategy:DeepSpeedStrategy",
        plugin="accel_core.plugins.deepspeed:DeepSpeedPlugin",
        flag="ACCELERATE_USE_DEEPSPEED",
        shown_as="deepspeed_plugins",
        containers=("deepspeed.runtime.engine:DeepSpeedEngine",),
    ),
    Row(
        "fsdp",
        _fsdp,
        plugin="accel_core.plugins.fsdp:FullyShardedDataParallelPlugin",
        flag="ACCELERATE_USE_FSDP",
        shown_as="fsdp_plugin",
        containers=("torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel",),
    ),
    Row(
        "mesh",
        "accel_core.strategies.mesh.strategy:MeshStrategy",
        plugin="accel_core.plugins.parallelism:TorchTensorParallelPlugin",
        shown_as="torch_tp_plugin",
        claims=_needs_mesh,
    ),
    Row(
        "xla",
        "accel_core.strategies.xla.strategy:XlaStrategy",
        claims=_on_xla,
        containers=WRAPPERS,
    ),
    Row(
        "ddp",
        "accel_core.strategies.ddp:DataParallelStrategy",
        plugin="accel_core.plugins.handlers:DistributedDataParallelKwargs",
        claims=lambda request: request.processes > 1,
    ),
    Row("single", "accel_core.strategies.single:SingleStrategy", claims=lambda request: True),
)

_BY_MACHINE = ("xla", "ddp", "single")
"""Rows that nobody asks for: hardware and processes choose them."""

for _row in ORDER:
    for _container in _row.containers:
        register_container(_container)
    for _form in _row.formats:
        register_format(_form)

_registered: dict[str, type[Strategy]] = {}


def register_strategy(strategy: type[Strategy]) -> None:
    """Register a strategy, as if an installed package had announced it; its `name` or its plugin selects it.

    Raises:
        ConfigurationError: Another class has the name.
    """
    if _registered.setdefault(strategy.name, strategy) is not strategy:
        raise ConfigurationError(
            f"Strategies need different names; got {strategy.name!r} again. Give the class another name."
        )
    register_format(strategy.format)


def choose(request: Request) -> Choice:
    """Return the strategy that a request asks for.

    Raises:
        ConfigurationError: Several engines are asked for, or one that XLA devices do not have; two third-party
            strategies claim the same request, or a name is unknown.
    """
    foreign = _foreign(request)
    if foreign is not None:
        return Choice(foreign, _plugins_for(foreign, request.plugins))
    row = _claimant(request)
    if row.name not in _BY_MACHINE and _on_xla(request):
        raise ConfigurationError(
            f"XLA devices support only whole models and models sharded by torch_xla; got the engine {row.name!r} "
            "where torch_xla is installed. Leave its plugin or variable out, or set USE_TORCH_XLA=0 to use another "
            "device."
        )
    own = row.of(request.plugins) or ((_load(row.plugin)(),) if row.plugin and row.claims is None else ())
    home = row.home(own[0]) if callable(row.home) else row.home
    strategy: type[Strategy] = _load(home)
    others = (plugin for plugin in _plugins_for(strategy, request.plugins) if all(plugin is not one for one in own))
    return Choice(strategy, (*own, *others), row.flag, row.shown_as, is_engine=row.name not in _BY_MACHINE)


def _plugins_for(strategy: type[Strategy], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the plugins of a strategy, then those of the strategies that it builds on."""
    kinds = [kind for base in strategy.__mro__ if (kind := vars(base).get("plugin_type")) is not None]
    return tuple(plugin for kind in kinds for plugin in given if isinstance(plugin, kind))


def _claimant(request: Request) -> Row:
    """Return the first row that claims a request: by a plugin that was given, else by variable or by the processes."""
    given = [row for row in ORDER if row.claims is None and row.of(request.plugins)]
    if len(given) > 1:
        raise ConfigurationError(
            f"Only one engine can train a model; got plugins of {' and '.join(row.name for row in given)}. Keep one."
        )
    if given:
        return given[0]
    return next(row for row in ORDER if (environ.flag(row.flag) if row.claims is None else row.claims(request)))


def _foreign(request: Request) -> type[Strategy] | None:
    """Return the third-party strategy that is named or whose plugin was given, if any."""
    wanted = environ.text("ACCELERATE_STRATEGY")
    # Looking for installed packages reads many files: only for plugins that are not our own.
    if wanted is None and all(type(plugin).__module__.startswith("accel_core.") for plugin in request.plugins):
        return None
    installed = {point.name: point for point in entry_points(group="accel.strategies")}
    if wanted is not None:
        if wanted in _registered:
            return _registered[wanted]
        if wanted not in installed:
            raise ConfigurationError(
                f"ACCELERATE_STRATEGY has to name an installed strategy; got {wanted!r}, and installed are "
                f"{sorted({*installed, *_registered})}. Install the package that provides it, or unset the variable."
            )
        named: type[Strategy] = installed[wanted].load()
        return named
    found = {name: point.load() for name, point in installed.items()} | _registered
    claimants = {
        name: strategy
        for name, strategy in found.items()
        if strategy.plugin_type is not None
        and any(isinstance(plugin, strategy.plugin_type) for plugin in request.plugins)
    }
    if len(claimants) > 1:
        raise ConfigurationError(
            f"Only one strategy can handle a run; got {sorted(claimants)}, which all claim it. Name one in "
            "ACCELERATE_STRATEGY."
        )
    return next(iter(claimants.values()), None)


def _load(home: str) -> Any:
    """Import a class by `module:Class`."""
    module, _, name = home.partition(":")
    return getattr(importlib.import_module(module), name)
