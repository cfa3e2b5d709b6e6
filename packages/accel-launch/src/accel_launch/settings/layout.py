"""Where the processes of a run are, computed from the settings."""

from collections.abc import Mapping
from dataclasses import dataclass

from accel_core.errors import ConfigurationError
from accel_launch.settings.devices import count_gpus
from accel_launch.settings.resolved import Resolved


@dataclass(frozen=True)
class ProcessLayout:
    """Processes and machines of a run."""

    processes: int  # processes over all machines, or of each replica, when as many machines as possible take part
    per_machine: int  # processes on each machine
    machines: int  # the largest number of machines
    fewest_machines: int  # the smallest number; less than `machines` in an elastic run
    machine_rank: int  # number of this machine, from 0

    @property
    def nnodes(self) -> str:
        """Return the machines as torchrun writes them."""
        return (
            str(self.machines) if self.machines == self.fewest_machines else f"{self.fewest_machines}:{self.machines}"
        )


def layout_of(settings: Mapping[str, Resolved], environment: Mapping[str, str]) -> ProcessLayout:
    """Work out where the processes are; the environment says which GPUs they see."""
    fewest, machines = _machines(settings)
    wanted, each = settings["num_processes"].value, settings["nproc_per_node"].value
    replicas = settings["replicas"].value if "replicas" in settings else None
    spread = 1 if replicas else machines  # each replica has all its processes on one machine
    if each is None:
        each = _per_machine(settings, environment, spread)
    elif wanted and wanted != each * spread and settings["nproc_per_node"].origin != "cluster":
        raise ConfigurationError(
            f"The numbers of processes contradict each other; got {wanted} from {_source(settings, 'num_processes')}, "
            f"and {each} per machine on {counted(machines, 'machine')} from {_source(settings, 'nproc_per_node')}. "
            "Leave one out."
        )
    rank = settings["machine_rank"].value or 0
    if rank >= machines:
        raise ConfigurationError(
            f"machine_rank is less than the number of machines; got {rank} from {_source(settings, 'machine_rank')} "
            f"for {counted(machines, 'machine')}. Give it {'0' if machines == 1 else f'0 to {machines - 1}'}."
        )
    return ProcessLayout(each * spread, each, machines, fewest, rank)


def _source(settings: Mapping[str, Resolved], key: str) -> str:
    return settings[key].source(key)


def counted(number: object, noun: str, plural: str = "s") -> str:
    """Return a number with its noun in the singular or the plural."""
    return f"{number} {noun}{'' if str(number) == '1' else plural}"


def _machines(settings: Mapping[str, Resolved]) -> tuple[int, int]:
    """Return the fewest machines and the most."""
    both = settings["nnodes"].value
    if both is None:
        return settings["num_machines"].value, settings["num_machines"].value
    low, _, high = str(both).partition(":")
    return int(low), int(high or low)


def _per_machine(settings: Mapping[str, Resolved], environment: Mapping[str, str], machines: int) -> int:
    wanted = settings["num_processes"].value
    if not wanted:
        if settings["cpu"].value or settings["tpu"].value:
            return 1
        return max(1, count_gpus(environment, settings["gpu_ids"].value))
    if wanted % machines:
        raise ConfigurationError(
            f"Processes spread evenly over machines; got {wanted} from {_source(settings, 'num_processes')} on "
            f"{machines} machines. Give a multiple of {machines}, or pass --nproc-per-node."
        )
    return int(wanted // machines)
