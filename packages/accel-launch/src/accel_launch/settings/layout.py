"""Where the processes of a run are: pure arithmetic on the settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_core.errors import ConfigurationError
from accel_launch.settings.devices import count_gpus

__all__ = ["Layout", "layout_of"]

_MOST_PROCESSES, _MOST_MACHINES = 1 << 12, 1 << 17


@dataclass(frozen=True)
class Layout:
    """Processes and machines of a run.

    Attributes:
        processes: Processes over all machines, when as many machines as possible take part.
        per_machine: Processes on each machine.
        machines: Machines at most.
        fewest_machines: Machines at least; less than `machines` in an elastic run.
        machine_rank: Number of this machine, from 0.
    """

    processes: int
    per_machine: int
    machines: int
    fewest_machines: int
    machine_rank: int

    @property
    def nnodes(self) -> str:
        """Return the machines as torchrun writes them."""
        return (
            str(self.machines) if self.machines == self.fewest_machines else f"{self.fewest_machines}:{self.machines}"
        )


def layout_of(settings: Mapping[str, Any]) -> Layout:
    """Work out where the processes are.

    Args:
        settings: Settings of the run; `inherited` of a `Settings` tells which GPUs are visible.

    Returns:
        The layout.

    Raises:
        ConfigurationError: The numbers are not valid, or contradict one another.
    """
    fewest, machines = _machines(settings)
    wanted, each = settings["num_processes"], settings["nproc_per_node"]
    if wanted is not None and wanted < 0:
        raise ConfigurationError(
            f"A run needs at least one process; --num-processes says {wanted}. Give a number from 1, or none to use "
            "every GPU, or one process without GPUs."
        )
    if each is not None and each < 1:
        raise ConfigurationError(
            f"A machine needs at least one process; --nproc-per-node says {each}. Give a number from 1."
        )
    if each is None:
        each = _per_machine(settings, wanted, machines)
    elif wanted and wanted != each * machines and not _said_by_cluster(settings, "nproc_per_node"):
        raise ConfigurationError(
            f"The numbers of processes contradict one another; --num-processes says {wanted}, --nproc-per-node "
            f"{each} on {machines} machines. Leave one of them out."
        )
    rank = settings["machine_rank"] or 0
    if not 0 <= rank < machines:
        raise ConfigurationError(
            f"--machine-rank counts from 0 and is less than the number of machines; got {rank} of {machines}. Give "
            f"{'0' if machines == 1 else f'0 to {machines - 1}'}."
        )
    if each > _MOST_PROCESSES or machines > _MOST_MACHINES:
        raise ConfigurationError(
            f"A run has at most {_MOST_PROCESSES} processes on each of {_MOST_MACHINES} machines; got {each} on "
            f"{machines}. Say --num-processes and --num-machines."
        )
    return Layout(each * machines, each, machines, fewest, rank)


def _said_by_cluster(settings: Mapping[str, Any], key: str) -> bool:
    said = getattr(settings, "said", {}).get(key)
    return said is not None and said.origin == "cluster"


def _machines(settings: Mapping[str, Any]) -> tuple[int, int]:
    said = settings["nnodes"]
    if said is None:
        number = settings["num_machines"]
        if number < 1:
            raise ConfigurationError(
                f"A run needs at least one machine; --num-machines says {number}. Give a number from 1."
            )
        return number, number
    low, _, high = str(said).partition(":")
    if not (low.isdigit() and (high or low).isdigit() and 1 <= int(low) <= int(high or low)):
        raise ConfigurationError(f"--nnodes cannot be read; got {said!r}. Give a number, or MIN:MAX as in 1:2.")
    return int(low), int(high or low)


def _per_machine(settings: Mapping[str, Any], wanted: int | None, machines: int) -> int:
    if not wanted:
        if settings["cpu"] or settings["tpu"]:
            return 1
        return max(1, count_gpus(getattr(settings, "inherited", {}), settings["gpu_ids"]))
    if wanted % machines:
        raise ConfigurationError(
            f"Processes spread evenly over machines; got {wanted} processes on {machines} machines. Give a multiple of "
            f"{machines}, or say --nproc-per-node."
        )
    return wanted // machines
