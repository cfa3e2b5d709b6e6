"""What `accel launch --explain` and `--dry-run` show, as data and for a person."""

import json
import os
import shlex
import sys
from dataclasses import asdict, replace
from typing import Any

from accel_core.options.engines import load
from accel_launch.launchers.launcher import Launcher
from accel_launch.settings.batch import batch_of
from accel_launch.settings.child import switched
from accel_launch.settings.devices import count_gpus
from accel_launch.settings.engines import asked_for, describe, engine_rows
from accel_launch.settings.layout import counted
from accel_launch.settings.mesh import Mesh, mesh_of
from accel_launch.settings.model import LOOK
from accel_launch.settings.resolve import Settings
from accel_launch.settings.resolved import Resolved
from accel_launch.settings.table import BY_KEY
from accel_launch.terminal import colors_wanted, paint

_SECRET = ("secret", "access_key")
_ENGINES = "engines"
_LINES = 4
"""How many groups along an axis are shown to a person."""


def explanation(settings: Settings) -> list[dict[str, Any]]:
    """Return every setting with its value and where it comes from."""
    rows = [
        {
            "key": key,
            "value": _shown(key, setting.value),
            "origin": setting.origin,
            "where": setting.where,
            "over": [
                {"value": _shown(key, weaker.value), "origin": weaker.origin, "where": weaker.where}
                for weaker in setting.overridden
                if weaker.origin != "default"
            ],
        }
        for key, setting in {**settings.resolved, **_decided_by_files(settings)}.items()
    ]
    return [*rows, {"key": _ENGINES, "value": _engines(settings), "origin": "installed", "where": "", "over": []}]


def _engines(settings: Settings) -> list[dict[str, Any]]:
    chosen = [engine.name for engine in asked_for(settings)]
    return [{**row, "chosen": row["name"] in chosen} for row in engine_rows()]


def _decided_by_files(settings: Settings) -> dict[str, Resolved]:
    """Return the settings that a file of the engine's own decides, over what was set elsewhere."""
    return {
        key: replace(found, overridden=(settings.resolved[key], *settings.resolved[key].overridden))
        for engine in switched(settings)
        if engine.decides
        for key, found in load(engine.decides)(settings).items()
    }


def _shown(key: str, value: object) -> Any:
    return "(hidden)" if value and any(word in key for word in _SECRET) else value  # outputs end in logs and issues


def print_explanation(settings: Settings, *, as_json: bool, every: bool = False) -> None:
    """Print what was set, grouped by topic, and what would start; with `every`, all settings."""
    rows = explanation(settings)
    if as_json:
        print(json.dumps(rows, indent=2, default=str))
        return
    engines = rows.pop()
    colors = colors_wanted(sys.stdout)
    print(f"Configuration file: {settings.file or 'none'}")
    print(_processes(settings))
    topic = ""
    shown = [row for row in rows if every or (row["origin"] != "default" and BY_KEY[row["key"]].topic != LOOK)]
    width = max((len(row["key"]) for row in shown), default=0)
    for row in shown:
        if BY_KEY[row["key"]].topic != topic:
            topic = BY_KEY[row["key"]].topic
            print(f"\n{paint(f'{topic}:', 'heading', colors)}")
        weaker = "".join(
            f"; over {setting['value']} ({setting['origin']}: {setting['where']})" for setting in row["over"]
        )
        origin = row["origin"] if row["origin"] == "default" else f"{row['origin']}: {row['where']}{weaker}"
        line = f"  {row['key']:<{width}}  {row['value']!s:<14} {origin}"
        print(paint(line, "faint", colors) if row["origin"] == "default" else line)
    if not every:
        others = sum(row["origin"] == "default" for row in rows)
        print(f"\n{others} other settings have their defaults; --all shows them.")
    listed = [engine for engine in engines["value"] if every or engine["chosen"]]
    if listed:
        print(f"\n{paint('Engines (* chosen by these settings):', 'heading', colors)}")
    for engine in listed:
        line = f"{'*' if engine['chosen'] else ' '} {engine['name']:<10}{describe(engine)}"
        print(line if engine["chosen"] else paint(line, "faint", colors))


def _processes(settings: Settings) -> str:
    """Return how many processes would start, and what decides that."""
    layout = settings.layout
    count = f"{counted(layout.processes, 'process', 'es')} on {counted(layout.nnodes, 'machine')}"
    for key in ("num_processes", "nproc_per_node"):
        if settings[key] and settings.is_set(key):
            return f"Starts {count}: {key} from {settings.source(key)}."
    if settings["cpu"] or settings["tpu"]:
        key = "cpu" if settings["cpu"] else "tpu"
        return f"Starts {count}: {key} from {settings.source(key)}, and no --num-processes."
    gpus = count_gpus(settings.inherited, settings["gpu_ids"])
    seen = "one for each GPU of this machine" if gpus else "this machine has no GPU, and there is no --num-processes"
    return f"Starts {count}: {seen}."


def plan(settings: Settings, launcher: Launcher) -> dict[str, Any]:
    """Return what would be started, machine by machine."""
    layout, mesh, batch = settings.layout, mesh_of(settings), batch_of(settings)
    machines = []
    for rank in range(layout.machines):
        there = replace(
            settings, resolved={**settings.resolved, "machine_rank": Resolved(rank, "flag", "--machine-rank")}
        )
        first = rank * layout.per_machine
        machines.append(
            {
                "machine_rank": rank,
                "command": launcher.command(there),
                "environment": {
                    name: value
                    for name, value in sorted(launcher.environ(there).items())
                    if settings.inherited.get(name) != value
                },
                "ranks": list(range(first, first + layout.per_machine)),
            }
        )
    return {
        "launcher": launcher.name,
        "job": job(settings) if (job := getattr(launcher, "job", None)) else "",  # others' launchers may have none
        "processes": layout.processes,
        "machines": machines,
        "nnodes": layout.nnodes,
        "mesh": mesh.sizes,
        "mesh_groups": {axis: mesh.groups(axis) for axis in _active(mesh)},
        "effective_batch": batch.samples,
        "batch": asdict(batch),
        "working_folder": os.getcwd(),
    }


def print_plan(settings: Settings, launcher: Launcher, *, as_json: bool) -> None:
    """Print what would be started."""
    found = plan(settings, launcher)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    colors = colors_wanted(sys.stdout)
    processes, machines = counted(found["processes"], "process", "es"), counted(found["nnodes"], "machine")
    print(f"Launcher {found['launcher']}: {processes} on {machines}.")
    _print_mesh(mesh_of(settings))
    print(batch_of(settings))
    if found["job"]:
        print(f"\n{found['job'].rstrip()}")
    for machine in [] if found["job"] else found["machines"]:
        ranks = machine["ranks"]
        name = paint(f"Machine {machine['machine_rank']}", "heading", colors)
        print(f"\n{name} ({f'ranks {ranks[0]} to {ranks[-1]}' if len(ranks) > 1 else f'rank {ranks[0]}'}):")
        print(f"  {shlex.join(machine['command'])}")
        for name, value in machine["environment"].items():
            print(f"    {name}={shlex.quote(value)}")
    print(f"\nNothing was {'submitted' if found['job'] else 'started'}.")


def _active(mesh: Mesh) -> list[str]:
    return [axis for axis, size in mesh.sizes.items() if size > 1]


def _print_mesh(mesh: Mesh) -> None:
    axes = _active(mesh) or ["dp"]
    print(f"Mesh: {' x '.join(f'{axis} {mesh.sizes[axis]}' for axis in axes)}")
    if not mesh.fits:
        processes = counted(mesh.processes, "process", "es")
        print(f"  these axes do not hold {processes}; the script is refused unless it sets others")
    if len(axes) < 2:
        return
    for axis in axes:
        groups = mesh.groups(axis)
        shown = "  ".join(",".join(map(str, ranks)) for ranks in groups[:_LINES])
        print(f"  {axis} together: {shown}{'  ...' if len(groups) > _LINES else ''}")
