"""The hosts of a run that DeepSpeed's own launcher starts: its hostfile and given, checked before anything starts.

DeepSpeed itself falls back to this machine if the hostfile is missing, and finds other mistakes only after it has
reached other hosts.
"""

import re
from pathlib import Path

from accel_core.errors import ConfigurationError
from accel_launch.settings.layout import counted
from accel_launch.settings.reading import read_text, shortened
from accel_launch.settings.resolve import Settings

__all__ = ["MPI", "active_slots", "check_hosts", "launcher_of", "read_hosts"]

MPI = ("openmpi", "mvapich", "mpich")
"""Multinode launchers that start as many processes on each host as the hostfile has slots, and take no filter."""

_FILTERS = ("deepspeed_inclusion_filter", "deepspeed_exclusion_filter")
_HOST = re.compile(r"(\S+)\s+slots=(\d+)(?:\s.*)?", re.ASCII)
_LARGEST_SLOTS = 1 << 12

Hosts = dict[str, list[int]]
"""Numbers of the slots in use, by host."""


def launcher_of(settings: Settings) -> str | None:
    """Return which of DeepSpeed's launchers reaches the other machines; None if torchrun starts this one.

    The default is pdsh, except under a scheduler, which has already started every machine.
    """
    if not settings["use_deepspeed"] or settings.layout.machines == 1:
        return None
    scheduled = any(settings.resolved[key].origin == "cluster" for key in ("num_machines", "nnodes"))
    name = str(settings["deepspeed_multinode_launcher"] or ("standard" if scheduled else "pdsh"))
    return None if name == "standard" else name


def check_hosts(settings: Settings) -> None:
    """Refuse a hostfile, given and numbers that DeepSpeed's launcher cannot start, or would start differently."""
    launcher, layout = launcher_of(settings), settings.layout
    _check_given(settings, launcher)
    if launcher == "slurm" and (settings["module"] or settings["no_python"]):
        raise ConfigurationError(
            "The multinode launcher slurm starts a Python file; got --module or --no-python. Start one, or use pdsh."
        )
    path = settings["deepspeed_hostfile"]
    if not path:
        raise ConfigurationError(
            f"DeepSpeed's launcher reads its hosts from a hostfile; got none for {layout.machines} machines. Pass "
            "--deepspeed-hostfile, or --deepspeed-multinode-launcher standard to start each machine yourself."
        )
    slots = active_slots(settings)
    if not any(settings[key] for key in _FILTERS) and len(slots) != layout.machines:
        raise ConfigurationError(
            f"The hostfile and the number of machines contradict each other; got {counted(len(slots), 'host')} in "
            f"{path}, and {layout.machines} machines. Correct one of them, or pass --deepspeed-inclusion-filter."
        )
    others = [f"{host} slots={len(found)}" for host, found in slots.items() if len(found) != layout.per_machine]
    if launcher in MPI and others:
        raise ConfigurationError(
            f"The multinode launcher {launcher} starts one process for each slot; got {', '.join(others)} in {path}, "
            f"and {layout.per_machine} processes per machine. Correct the hostfile, or --num-processes."
        )


def _check_given(settings: Settings, launcher: str | None) -> None:
    given = [f"{settings[key]!r} from {settings.source(key)}" for key in _FILTERS if settings[key]]
    if len(given) == 2:
        raise ConfigurationError(
            f"DeepSpeed accepts one filter, of hosts to use or to leave out; got {' and '.join(given)}. Leave one out."
        )
    if launcher in MPI and given:
        raise ConfigurationError(
            f"The multinode launcher {launcher} accepts no filter; got {given[0]}. Leave those hosts out of the "
            "hostfile, or use pdsh."
        )


def active_slots(settings: Settings) -> Hosts:
    """Return the hosts and slots that remain after the given."""
    hosts = read_hosts(Path(str(settings["deepspeed_hostfile"])))
    if settings["deepspeed_inclusion_filter"]:
        named = _filtered(settings, "deepspeed_inclusion_filter", hosts)
        return {host: named[host] for host in hosts if host in named}
    if settings["deepspeed_exclusion_filter"]:
        named = _filtered(settings, "deepspeed_exclusion_filter", hosts)
        left = {host: [slot for slot in slots if slot not in named.get(host, ())] for host, slots in hosts.items()}
        left = {host: slots for host, slots in left.items() if slots}
        if not left:
            raise ConfigurationError(
                f"The filter leaves no host over; got {settings['deepspeed_exclusion_filter']!r} from "
                f"{settings.source('deepspeed_exclusion_filter')}. Leave out fewer hosts."
            )
        return left
    return hosts


def read_hosts(path: Path) -> Hosts:
    """Read a hostfile: one `NAME slots=N` in a line."""
    hosts: Hosts = {}
    for number, text in enumerate(read_text(path, "The hostfile").splitlines(), 1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        found = _HOST.fullmatch(line)
        if found is None or not 0 < int(found[2]) <= _LARGEST_SLOTS:
            raise ConfigurationError(
                f"{path}:{number}: a line of the hostfile has the form NAME slots=N; got {shortened(line)!r}. Correct "
                "it."
            )
        if found[1] in hosts:
            raise ConfigurationError(
                f"{path}:{number}: a host may occur only once; got {shortened(found[1])} again. Remove it."
            )
        hosts[found[1]] = list(range(int(found[2])))
    if not hosts:
        raise ConfigurationError(f"The hostfile has to name at least one host; got none in {path}. Write NAME slots=N.")
    return hosts


def _filtered(settings: Settings, key: str, hosts: Hosts) -> Hosts:
    """Return the slots that a filter such as `w0@w1:0,2` names, all those of a host that it names alone."""
    text, where = str(settings[key]), settings.source(key)
    named: Hosts = {}
    for part in text.split("@"):
        host, colon, numbers = part.partition(":")
        if host not in hosts:
            raise ConfigurationError(
                f"The filter names a host that is not in the hostfile; got {shortened(host)!r} from {where}. Use "
                f"{', '.join(hosts)}."
            )
        if colon and not re.fullmatch(r"\d{1,6}(?:,\d{1,6})*", numbers, re.ASCII):
            raise ConfigurationError(
                f"A filter has the form NAME or NAME:SLOT,SLOT, with @ between hosts; got {shortened(part)!r} from "
                f"{where}. Correct it."
            )
        slots = [int(slot) for slot in numbers.split(",")] if colon else hosts[host]
        missing = [slot for slot in slots if slot not in hosts[host]]
        if missing:
            raise ConfigurationError(
                f"The filter names a slot that the host does not have; got {host}:{missing[0]} from {where}. Use 0 to "
                f"{len(hosts[host]) - 1}."
            )
        named[host] = sorted({*named.get(host, ()), *slots})
    return named
