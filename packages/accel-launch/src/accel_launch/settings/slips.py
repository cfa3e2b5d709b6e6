"""Probable mistakes that could still be meant: each is a warning that names the fix."""

from collections.abc import Iterator

from accel_core.options.engines import engines
from accel_launch.settings.child import active
from accel_launch.settings.devices import SEVERAL_DEVICES, visible_gpus
from accel_launch.settings.resolve import Settings
from accel_launch.settings.table import BY_KEY
from accel_launch.settings.variables import unread

__all__ = ["slips"]


def slips(settings: Settings) -> Iterator[str]:
    """Yield a warning for each setting that is misspelled or without effect."""
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
    """Yield a warning for flags of an engine that the run does not use, and for shards over one process."""
    for key, row in BY_KEY.items():
        if row.engine and settings.resolved[key].origin == "flag" and not active(row.engine, settings):
            yield f"{settings.source(key)} has no effect: it is for {row.topic}, which these settings do not use."
    shards = "use_fsdp"
    if settings.get(shards) and settings.layout.processes < 2:
        yield f"{shards} from {settings.source(shards)} shards a model over processes; got 1. Pass --num-processes."
