"""Which of the engines that accel knows a run asks for, and which are installed here. Imports none of them."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from accel_core.options.engines import Engine, engines, require_switched
from accel_launch.settings.child import active, switched
from accel_launch.settings.mesh import mesh_of
from accel_launch.settings.resolve import Settings

_FP8 = "fp8-"


def asked_for(settings: Settings) -> list[Engine]:
    """Return the engines that the settings of a run choose; a script may choose others."""
    require_switched(settings)
    names = set(_names(settings))
    return [engine for engine in _shown() if engine.name in names]


def _shown() -> list[Engine]:
    return [engine for engine in engines().values() if engine.library]


def _names(settings: Settings) -> Iterator[str]:
    chosen = ["xla"] if settings["tpu"] else []
    for engine in switched(settings):
        version = f"{engine.name}_version"  # an engine of several versions has a row for each
        chosen.append(f"{engine.name}{settings[version]}" if version in settings else engine.name)
    yield from chosen
    if not chosen and settings.layout.processes > 1:
        yield "ddp"
    if active("parallelism", settings):
        yield from (axis for axis, size in mesh_of(settings).sizes.items() if size > 1)
    if settings["mixed_precision"] == "fp8":
        yield _FP8 + str(settings["fp8_backend"]).lower() if settings["fp8_backend"] else _first_fp8()


def _first_fp8() -> str:
    """Return the engine that a process takes for 8 bits if none is named: the first that is installed."""
    known = [engine for engine in _shown() if engine.name.startswith(_FP8)]
    return next((engine for engine in known if not engine.presence().problem), known[0]).name


def engine_rows() -> list[dict[str, Any]]:
    """Return every engine that accel knows, with what is installed for it."""
    return [
        {"name": engine.name, "title": engine.title, "library": engine.library, **asdict(engine.presence())}
        for engine in _shown()
    ]


def describe(row: dict[str, Any]) -> str:
    """Return a description of an engine, in one line."""
    if row["problem"]:
        return f"{row['title']}: {row['problem']}; run `{row['remedy']}`"
    return f"{row['title']}: {row['library']} {row['version']}"
