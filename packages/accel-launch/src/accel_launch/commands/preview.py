"""What `accel launch --explain` and `--dry-run` show, as data and for a person."""

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_launch.launchers.launcher import Launcher
from accel_launch.settings.child import ACTIVE
from accel_launch.settings.layout import layout_of
from accel_launch.settings.resolve import Said, Settings
from accel_launch.settings.table import BY_KEY
from accel_launch.terminal import colours_wanted, paint

__all__ = ["explanation", "mesh_of", "plan", "print_explanation", "print_plan"]

_SECRET = ("secret", "access_key")


def explanation(settings: Settings) -> list[dict[str, Any]]:
    """Return every setting with its value and who said it.

    Args:
        settings: Settings of the run.

    Returns:
        One object per setting: key, value, origin, where, and what weaker sources said.
    """
    return [
        {
            "key": key,
            "value": _shown(key, said.value),
            "origin": said.origin,
            "where": said.where,
            "over": [
                {"value": _shown(key, weaker.value), "origin": weaker.origin, "where": weaker.where}
                for weaker in said.over
                if weaker.origin != "default"
            ],
        }
        for key, said in settings.said.items()
    ]


def _shown(key: str, value: Any) -> Any:
    return "(hidden)" if value and any(word in key for word in _SECRET) else value


def print_explanation(settings: Settings, *, as_json: bool) -> None:
    """Print every setting, grouped by topic; what somebody said stands out.

    Args:
        settings: Settings of the run.
        as_json: Print JSON instead.
    """
    rows = explanation(settings)
    if as_json:
        print(json.dumps(rows, indent=2, default=str))
        return
    colours = colours_wanted(sys.stdout)
    print(f"Configuration file: {settings.file or 'none'}")
    topic = ""
    width = max(len(row["key"]) for row in rows)
    for row in rows:
        if BY_KEY[row["key"]].topic != topic:
            topic = BY_KEY[row["key"]].topic
            print(f"\n{paint(f'{topic}:', 'heading', colours)}")
        weaker = "".join(f"; over {said['value']} ({said['origin']}: {said['where']})" for said in row["over"])
        origin = row["origin"] if row["origin"] == "default" else f"{row['origin']}: {row['where']}{weaker}"
        line = f"  {row['key']:<{width}}  {row['value']!s:<14} {origin}"
        print(paint(line, "faint", colours) if row["origin"] == "default" else line)


def mesh_of(settings: Settings) -> dict[str, int]:
    """Return the size of every mesh axis, the outermost first.

    Args:
        settings: Settings of the run.

    Returns:
        Sizes by axis; one axis `dp` where no parallelism is configured.
    """
    processes = layout_of(settings).processes
    if ACTIVE["megatron"](settings):
        tensor, pipeline = int(settings["megatron_lm_tp_degree"]), int(settings["megatron_lm_pp_degree"])
        return {"pp": pipeline, "dp": max(1, processes // (tensor * pipeline)), "tp": tensor}
    if not ACTIVE["parallelism"](settings):
        return {"dp": processes}
    axes = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
    return {axis: int(settings[f"parallelism_config_{axis}_size"]) for axis in axes}


def _effective_batch(settings: Settings) -> int | None:
    file = settings["deepspeed_config_file"]
    if not settings["use_deepspeed"] or not file or not Path(file).is_file():
        return None
    try:
        config: Mapping[str, Any] = json.loads(Path(file).read_text())
    except ValueError:
        return None
    total, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    if isinstance(total, int):
        return total
    steps = settings["gradient_accumulation_steps"] or config.get("gradient_accumulation_steps", 1)
    if isinstance(micro, int) and isinstance(steps, int):
        return micro * steps * layout_of(settings).processes
    return None


def plan(settings: Settings, launcher: Launcher) -> dict[str, Any]:
    """Return what would be started, machine by machine.

    Args:
        settings: Settings of the run.
        launcher: The launcher that claimed it.

    Returns:
        The launcher, and for every machine its command line, environment and ranks; the mesh; the batch of one
        optimizer step over all ranks where it is known.
    """
    layout = layout_of(settings)
    machines = []
    for rank in range(layout.machines):
        there = replace(settings, said={**settings.said, "machine_rank": Said(rank, "flag", "--machine-rank")})
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
        "processes": layout.processes,
        "machines": machines,
        "nnodes": layout.nnodes,
        "mesh": mesh_of(settings),
        "effective_batch": _effective_batch(settings),
        "working_folder": os.getcwd(),
    }


def print_plan(settings: Settings, launcher: Launcher, *, as_json: bool) -> None:
    """Print what would be started.

    Args:
        settings: Settings of the run.
        launcher: The launcher that claimed it.
        as_json: Print JSON instead.
    """
    found = plan(settings, launcher)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    colours = colours_wanted(sys.stdout)
    mesh = " x ".join(f"{axis} {size}" for axis, size in found["mesh"].items())
    print(f"Launcher {found['launcher']}: {found['processes']} processes on {found['nnodes']} machines, mesh {mesh}.")
    if found["effective_batch"]:
        print(f"One optimizer step sees {found['effective_batch']} samples.")
    for machine in found["machines"]:
        ranks = machine["ranks"]
        name = paint(f"Machine {machine['machine_rank']}", "heading", colours)
        print(f"\n{name} (ranks {ranks[0]} to {ranks[-1]}):")
        print(f"  {shlex.join(machine['command'])}")
        for name, value in machine["environment"].items():
            print(f"    {name}={shlex.quote(value)}")
    print("\nNothing was started.")
