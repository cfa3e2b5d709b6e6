"""Which strategy a run uses: that of the first engine that claims it.

Claims are decided before a strategy is imported. A third party adds a strategy through the entry-point group
`accel.strategies`, or in a process by `register_strategy`; it is chosen by the type of its own plugin, or by its name
in ACCELERATE_STRATEGY. An engine that has variables, options or a part in the launcher is a row under `accel.engines`.
"""

from __future__ import annotations

from typing import Any

from accel_core._records import record
from accel_core.checkpoint.formats import register_format
from accel_core.devices import registry as devices
from accel_core.errors import ConfigurationError, expect_one_of
from accel_core.host import environ
from accel_core.host.installed import points_of
from accel_core.logging import get_logger
from accel_core.options.engines import BUILT_IN, Engine, engines, flagged, load, require
from accel_core.plugins.handlers import DistributedDataParallelKwargs
from accel_core.plugins.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from accel_core.strategies.strategy import Strategy


@record(frozen=True)
class Request:
    """What was asked for, before any strategy exists."""

    processes: int  # number of processes
    plugins: tuple[Any, ...] = ()  # everything that was given and configures a strategy, built in or not
    parallelism: ParallelismConfig | None = None  # the axes of the mesh, or `None`
    cpu: bool = False  # whether the run computes on the CPU whatever hardware is here


@record(frozen=True)
class Choice:
    """The strategy of a run."""

    strategy: type[Strategy]  # its class
    plugins: tuple[Any, ...]  # its plugins, made from the environment where none was given
    argument: str = ""  # argument of the Accelerator that takes the plugin; empty for a strategy that has none
    flag: str = ""  # variable that tells other libraries of the engine; empty for a strategy that has none
    is_engine: bool = True  # whether it was asked for by plugin, variable or name, not just by the number of processes


def needs_mesh(request: Request) -> bool:
    """Return whether the request asks for more than plain data parallelism."""
    axes = request.parallelism
    if any(isinstance(plugin, TorchTensorParallelPlugin) for plugin in request.plugins):
        return True
    return axes is not None and (axes.non_data_parallel_size > 1 or axes.dp_shard_enabled or axes.ep_enabled)


def has_several_processes(request: Request) -> bool:
    """Return whether several processes train."""
    return request.processes > 1


def is_any(request: Request) -> bool:
    """Return True."""
    return True


def on_xla(request: Request) -> bool:
    """Return whether the run uses XLA devices, which come first if torch_xla is installed."""
    if request.cpu or environ.flag("ACCELERATE_USE_CPU"):
        return False
    wanted = environ.text("ACCELERATE_TORCH_DEVICE")
    return wanted.startswith("xla") if wanted else devices.named("xla").is_available()


_logger = get_logger(__name__)
_registered: dict[str, type[Strategy]] = {}


def register_strategy(strategy: type[Strategy]) -> None:
    """Register a strategy, as if an installed package had announced it; its `name` or its plugin selects it."""
    _registered[strategy.name] = strategy
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
    by_machine = any(row.name == engine.name for engine in BUILT_IN)
    if not row.strategy:
        require(row.name, f"a process on {row.title}")
        row = engines()[row.name]
    if not by_machine and on_xla(request):
        raise ConfigurationError(
            f"XLA devices support only whole models and models sharded by torch_xla; got the engine {row.name!r} "
            "where torch_xla is installed. Leave its plugin or variable out, or set USE_TORCH_XLA=0 to use another "
            "device."
        )
    own = row.own(request.plugins) or ((load(row.plugin)(),) if row.plugin and not row.claims else ())
    home = load(row.strategy)
    # An engine with several strategies chooses by its plugin and the mesh.
    strategy: type[Strategy] = (
        home if isinstance(home, type) else load(home(next(iter(own), None), request.parallelism))
    )
    others = (plugin for plugin in _plugins_for(strategy, request.plugins) if all(plugin is not one for one in own))
    return Choice(strategy, (*own, *others), row.argument, row.flag, not by_machine)


def _plugins_for(strategy: type[Strategy], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the plugins of a strategy, then those of the strategies that it builds on."""
    kinds = [kind for base in strategy.__mro__ if (kind := vars(base).get("plugin_type")) is not None]
    return tuple(plugin for kind in kinds for plugin in given if isinstance(plugin, kind))


def _claimant(request: Request) -> Engine:
    """Return the engine that claims a request: by its plugin, else by its variable, else by the processes."""
    handlers = (DistributedDataParallelKwargs,)
    plugins = any(not isinstance(plugin, handlers) for plugin in request.plugins)
    axes = needs_mesh(request)
    # Packages are looked for only where a plugin, a variable or an axis asks for one: that reads many files.
    rows = tuple(engines().values()) if plugins or axes else BUILT_IN
    given = [row for row in rows if row.strategy and not row.claims and row.own(request.plugins)]
    if len(given) > 1:
        raise ConfigurationError(
            f"Only one engine can train a model; got plugins of {' and '.join(row.name for row in given)}. Keep one."
        )
    asked = flagged()
    if given and asked and given[0] not in asked:
        _logger.warning(
            "A plugin in code comes before the launcher's engine; got %s, and %s=true. Leave one of them out.",
            *(type(given[0].own(request.plugins)[0]).__name__, asked[0].flag),
        )
    chosen = given or asked
    if chosen:
        return chosen[0]
    if axes:
        require("torch_tp", "axes along which ranks share a model")
    return next(row for row in rows if row.claims and load(row.claims)(request))


def _foreign(request: Request) -> type[Strategy] | None:
    """Return the third-party strategy that is named or whose plugin was given, if any."""
    wanted = environ.text("ACCELERATE_STRATEGY")
    # Looking for installed packages reads many files: only for plugins that are not our own.
    if wanted is None and all(type(plugin).__module__.startswith("accel_core.") for plugin in request.plugins):
        return None
    known: dict[str, Any] = {**points_of("accel.strategies"), **_registered}
    if wanted is not None:
        expect_one_of(sorted(known), "the strategy", wanted, " from ACCELERATE_STRATEGY")
    named = known if wanted is None else {wanted: known[wanted]}
    found: dict[str, type[Strategy]] = {
        name: load(strategy) if isinstance(strategy, str) else strategy for name, strategy in named.items()
    }
    kinds = {name: strategy.plugin_type or () for name, strategy in found.items()}
    claimants = [name for name in found if wanted or any(isinstance(each, kinds[name]) for each in request.plugins)]
    if len(claimants) > 1:
        raise ConfigurationError(
            f"Only one strategy can handle a run; got {sorted(claimants)}, which all claim it. Name one in "
            "ACCELERATE_STRATEGY."
        )
    return found[claimants[0]] if claimants else None
