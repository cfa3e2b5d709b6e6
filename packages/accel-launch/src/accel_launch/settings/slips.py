"""Probable mistakes that could still be meant: each is a warning that names the fix."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from accel_core.options.engines import engines
from accel_launch.settings.child import active
from accel_launch.settings.devices import SEVERAL_DEVICES, visible_gpus
from accel_launch.settings.model import ELASTIC, HARDWARE, PROCESSES
from accel_launch.settings.resolve import Settings
from accel_launch.settings.table import ALL, BY_KEY
from accel_launch.settings.variables import unread

_READ = 1 << 20
_FLAGS = {
    word: setting
    for setting in ALL
    if setting.topic in (HARDWARE, PROCESSES, ELASTIC)
    for word in setting.words
    if word.startswith("--")
}
"""Flags about processes and devices, which few scripts have."""


def slips(settings: Settings) -> Iterator[str]:
    """Yield a warning for each setting that is misplaced, misspelled or without effect."""
    written = _misplaced(settings)
    if written is not None:
        yield written
    yield from _outweighed(settings)
    yield from _without_effect(settings)
    for name, near in unread(settings.inherited):
        if near:
            yield f"nothing reads the variable {name}. Did you mean {near}?"
    kind = settings.config.get("distributed_type")
    left_out = next((each for each in engines().values() if each.switch and each.label == kind), None)
    if left_out is not None and settings["cpu"] and not settings[left_out.switch]:
        yield (
            f"distributed_type of {settings.file} is ignored, as in Accelerate, because the hardware is chosen "
            f"elsewhere; got {kind} and cpu from {settings.source('cpu')}. The run trains without {left_out.title}; "
            f"pass --{left_out.switch.replace('_', '-')} as well to train with it."
        )
    if settings["gpu_ids"] in (None, "all") or kind in SEVERAL_DEVICES[1:] or settings["cpu"]:
        return
    there = visible_gpus(settings.inherited, settings["gpu_ids"])
    if len(there) < len(settings["gpu_ids"].split(",")):
        yield (
            f"gpu_ids names GPUs that this machine does not have; got {settings['gpu_ids']!r} from "
            f"{settings.source('gpu_ids')}, of which it has {', '.join(there) or 'none'}. The run uses "
            f"{'no others' if there else 'the CPU'}; correct it, or pass --cpu."
        )


def _outweighed(settings: Settings) -> Iterator[str]:
    """Yield a warning for each variable, perhaps left by an outer launch, that counts where Accelerate obeys a file."""
    for key, setting in settings.resolved.items():
        if setting.origin != "environment" or setting.where.startswith("ACCEL_"):
            continue
        for other in setting.overridden:
            if other.origin == "file" and other.value != setting.value:
                yield (
                    f"the variable {setting.where} outweighs the configuration file; {key} is {setting.value!r}, not "
                    f"{other.value!r} from {other.where}. Unset the variable if the file is meant."
                )


def _without_effect(settings: Settings) -> Iterator[str]:
    """Yield a warning for flags of an engine or launcher that the run does not use, and for shards over one process."""
    for key, row in BY_KEY.items():
        if row.engine and settings.resolved[key].origin == "flag" and not active(row.engine, settings):
            yield f"{settings.source(key)} has no effect: it is for {row.topic}, which these settings do not use."
    shards = "use_fsdp"
    if settings.get(shards) and settings.layout.processes < 2:
        yield f"{shards} from {settings.source(shards)} shards a model over processes; got 1. Pass --num-processes."


def _misplaced(settings: Settings) -> str | None:
    """Return the warning about a launcher's flag that goes to the script, which does not define it."""
    words = settings.arguments
    for place, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        setting = _FLAGS.get(flag.replace("_", "-"))
        if setting is None or _defines(settings, flag.lstrip("-")):
            continue
        takes = not setting.yes_or_no and not equals
        moved = shlex.join(words[place : place + 1 + takes])
        return (
            f"{flag} comes after the script, so it goes to the script and not to the launcher. If it is meant for the "
            f"launcher, write it before: accel launch {moved} {settings.script}"
        )
    return None


_DEFINES = r"""["']--{0}["'/=\s]|(?<![\w."']){0}\s*:\s*[a-zA-Z]|\bdef \w+\([^)]*(?<![\w."']){0}\b"""
"""An option in quotes, as argparse and click have it, or a field or parameter, as for HfArgumentParser, typer, fire."""


def _defines(settings: Settings, name: str) -> bool:
    """Return whether the script's text defines an option, so that the option is its own."""
    path = Path(str(settings.script))
    if settings["no_python"] or not path.is_file():
        return False
    with path.open("rb") as file:
        text = file.read(_READ).decode(errors="replace")
    return re.search(_DEFINES.format(re.sub("[-_]", "[-_]", name)), text) is not None
