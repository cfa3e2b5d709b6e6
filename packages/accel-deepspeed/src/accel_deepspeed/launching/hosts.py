"""The hosts of a run that DeepSpeed's own launcher starts: its hostfile, checked before anything starts.

DeepSpeed itself falls back to this machine if the hostfile is missing, and does not know how many machines were asked
for. What a line or a filter of it may say, DeepSpeed checks.
"""

import re
from pathlib import Path

from accel_core.errors import ConfigurationError
from accel_launch.settings.layout import counted
from accel_launch.settings.reading import read_text
from accel_launch.settings.resolve import Settings

MPI = ("openmpi", "mvapich", "mpich")
"""Multinode launchers that start as many processes on each host as the hostfile has slots, and take no filter."""

_HOST = re.compile(r"^\s*([^\s#]\S*)\s+slots=(\d+)", re.ASCII | re.MULTILINE)


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
    """Refuse a hostfile whose hosts are not those that the run was asked to start on."""
    launcher, layout, path = launcher_of(settings), settings.layout, settings["deepspeed_hostfile"]
    if launcher == "slurm" and (settings["module"] or settings["no_python"]):
        raise ConfigurationError(
            "The multinode launcher slurm starts a Python file; got --module or --no-python. Start one, or use pdsh."
        )
    if not path:
        raise ConfigurationError(
            f"DeepSpeed's launcher reads its hosts from a hostfile; got none for {layout.machines} machines. Pass "
            "--deepspeed-hostfile, or --deepspeed-multinode-launcher standard to start each machine yourself."
        )
    slots = dict(_HOST.findall(read_text(Path(str(path)), "The hostfile")))
    filtered = settings["deepspeed_inclusion_filter"] or settings["deepspeed_exclusion_filter"]
    if not filtered and len(slots) != layout.machines:
        raise ConfigurationError(
            f"The hostfile and the number of machines contradict each other; got {counted(len(slots), 'host')} in "
            f"{path}, and {layout.machines} machines. Correct one of them, or pass --deepspeed-inclusion-filter."
        )
    others = [f"{host} slots={found}" for host, found in slots.items() if int(found) != layout.per_machine]
    if launcher in MPI and others:
        raise ConfigurationError(
            f"The multinode launcher {launcher} starts one process for each slot; got {', '.join(others)} in {path}, "
            f"and {layout.per_machine} processes per machine. Correct the hostfile, or --num-processes."
        )
