"""Which strategy a run uses: the first row whose claim holds.

Claims are decided before a strategy is imported. A third party adds a strategy through the entry-point group
`accel.strategies`; it is chosen by the type of its own plugin, or by its name in ACCELERATE_STRATEGY.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from accel_core._records import record
from accel_core.errors import ConfigurationError, EngineUnavailableError
from accel_core.host import environ

__all__ = ["ORDER", "Request", "Row", "choose"]


@record(frozen=True)
class Request:
    """What was asked for, before any strategy exists.

    Attributes:
        processes: Number of processes.
        deepspeed: The DeepSpeed plugin, or `None`.
        fsdp: The FSDP plugin, or `None`.
        megatron: The Megatron-LM plugin, or `None`.
        tensor_parallel: The tensor-parallel plugin, or `None`.
        mesh: The parallelism configuration, or `None`.
        others: Plugins of third parties.
    """

    processes: int
    deepspeed: Any = None
    fsdp: Any = None
    megatron: Any = None
    tensor_parallel: Any = None
    mesh: Any = None
    others: tuple[Any, ...] = ()


@record(frozen=True)
class Row:
    """One way to run.

    Attributes:
        name: Its name.
        claims: Says, from the request alone, whether it is the one.
        home: `module:Class`; empty for an engine that is not part of this version.
    """

    name: str
    claims: Callable[[Request], bool]
    home: str


def _asked(plugin: Any, variable: str) -> bool:
    return plugin is not None or environ.flag(variable)


ORDER: tuple[Row, ...] = (
    Row("megatron", lambda r: _asked(r.megatron, "ACCELERATE_USE_MEGATRON_LM"), ""),
    Row("deepspeed", lambda r: _asked(r.deepspeed, "ACCELERATE_USE_DEEPSPEED"), ""),
    Row("fsdp", lambda r: _asked(r.fsdp, "ACCELERATE_USE_FSDP"), ""),
    Row("mesh", lambda r: r.tensor_parallel is not None or _needs_mesh(r.mesh), ""),
    Row("ddp", lambda r: r.processes > 1, "accel_core.strategies.ddp:DataParallelStrategy"),
    Row("single", lambda r: True, "accel_core.strategies.single:SingleStrategy"),
)


def _needs_mesh(mesh: Any) -> bool:
    """Say whether a parallelism configuration asks for more than plain data parallel."""
    return mesh is not None and (mesh.non_data_parallel_size > 1 or mesh.dp_shard_size > 1)


def choose(request: Request) -> type:
    """Return the strategy class that a request asks for.

    Raises:
        EngineUnavailableError: The engine asked for is not part of this version; it is never replaced by another.
        ConfigurationError: Two third-party strategies claim the same request, or a name is unknown.
    """
    foreign = _foreign(request)
    if foreign is not None:
        return foreign
    row = next(row for row in ORDER if row.claims(request))
    if not row.home:
        raise EngineUnavailableError(
            f"The engine {row.name!r} was asked for (by plugin or ACCELERATE_USE_*), and accel-core does not contain "
            "it yet. Remove the plugin or variable to train data parallel; accel never does that on its own."
        )
    module, _, name = row.home.partition(":")
    found: type = getattr(importlib.import_module(module), name)
    return found


def _foreign(request: Request) -> type | None:
    """Return the third-party strategy that is named or whose plugin was given, if any."""
    wanted = environ.text("ACCELERATE_STRATEGY")
    if wanted is None and not request.others:
        return None
    found = {point.name: point for point in entry_points(group="accel.strategies")}
    if wanted is not None:
        if wanted not in found:
            raise ConfigurationError(
                f"No strategy is called {wanted!r} (ACCELERATE_STRATEGY); installed are {sorted(found)}. "
                "Install the package that provides it, or unset the variable."
            )
        named: type = found[wanted].load()
        return named
    claimants: dict[str, type] = {}
    for name, point in found.items():
        strategy = point.load()
        plugin_type = getattr(strategy, "plugin_type", None)
        if plugin_type is not None and any(isinstance(plugin, plugin_type) for plugin in request.others):
            claimants[name] = strategy
    if len(claimants) > 1:
        raise ConfigurationError(
            f"Several strategies claim this run: {sorted(claimants)}. Name one in ACCELERATE_STRATEGY."
        )
    return next(iter(claimants.values()), None)
