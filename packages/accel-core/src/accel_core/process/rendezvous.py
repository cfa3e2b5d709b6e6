"""How a process learns its rank, and where the ranks meet.

Ranks come from torchrun, MPI (Open MPI, PMI, MVAPICH2), torch_xla or SLURM. SLURM's count only inside an srun step:
plain `python` under sbatch is one process, whatever the allocation holds.
"""

from __future__ import annotations

import importlib
import re

from accel_core._records import record
from accel_core.errors import ConfigurationError, StateError
from accel_core.host import environ


@record(frozen=True)
class ProcessEnv:
    """Where a process stands among its fellows."""

    rank: int  # number of the process, from 0 to `size` - 1
    size: int  # number of processes
    local_rank: int  # number of the process on its machine
    local_size: int  # number of processes on its machine
    source: str  # who said so: `torchrun`, `openmpi`, `pmi`, `mvapich2`, `xla`, `slurm` or `alone`
    # Whether the environment gives `local_size`; otherwise it assumes that all processes are on one machine.
    counted: bool = True


@record(frozen=True)
class Launcher:
    """The variables by which a launcher tells a process its place."""

    name: str  # the launcher, as `ProcessEnv.source` names it
    rank: str  # variable of the process's number
    size: str  # variable of the number of processes
    local_rank: str  # variable of the process's number on its machine
    local_size: str  # variable of the number of processes on its machine

    @classmethod
    def with_prefix(cls, name: str, prefix: str) -> Launcher:
        """Return a launcher whose variables are RANK, SIZE, LOCAL_RANK and LOCAL_SIZE behind a prefix."""
        return cls(name, *(prefix + word for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))


LAUNCHERS: tuple[Launcher, ...] = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Launcher.with_prefix("openmpi", "OMPI_COMM_WORLD_"),
    Launcher.with_prefix("mvapich2", "MV2_COMM_WORLD_"),
    Launcher("pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""In the order in which they are believed: torchrun, then the kinds of MPI."""

_FIRST_PORT, _PORTS = 20000, 20000
_BETWEEN_STEPS = 1009  # so that a step rarely has the port of the job that was submitted next


def locate() -> ProcessEnv:
    """Read this process's place from the environment.

    Raises:
        ConfigurationError: The variables contradict each other.
    """
    for launcher in LAUNCHERS:
        rank, size = environ.integer(launcher.rank), environ.integer(launcher.size)
        if rank is not None and size is not None:
            local_rank, local_size = environ.integer(launcher.local_rank), environ.integer(launcher.local_size)
            return _checked(launcher.name, rank, size, local_rank, local_size, launcher.size)
    started_by_xla = environ.integer("PJRT_LOCAL_PROCESS_COUNT")
    if started_by_xla is not None:
        runtime = importlib.import_module("torch_xla.runtime")
        rank, size, local_rank = runtime.global_ordinal(), runtime.world_size(), runtime.local_ordinal()
        return _checked("xla", rank, size, local_rank, started_by_xla, "torch_xla.runtime.world_size()")
    if environ.integer("SLURM_STEP_ID") is not None and environ.integer("SLURM_PROCID") is not None:
        rank, local_rank = environ.integer("SLURM_PROCID", 0) or 0, environ.integer("SLURM_LOCALID")
        size = environ.integer("SLURM_STEP_NUM_TASKS") or environ.integer("SLURM_NTASKS") or 1
        return _checked("slurm", rank, size, local_rank, _slurm_local_size(), "SLURM_STEP_NUM_TASKS")
    return ProcessEnv(0, 1, 0, 1, "alone")


def _checked(
    source: str, rank: int, size: int, local_rank: int | None, local_size: int | None, size_name: str
) -> ProcessEnv:
    if size < 1 or not 0 <= rank < size:
        raise ConfigurationError(
            f"The environment gives this process rank {rank} of {size} ({size_name}, from {source}). "
            "Start the processes with one launcher only, or unset its variables."
        )
    local = rank if local_rank is None or local_rank < 0 else local_rank
    if local_size and local_size > 0:
        return ProcessEnv(rank, size, local, local_size, source)
    return ProcessEnv(rank, size, local, size, source, counted=False)


def _slurm_local_size() -> int | None:
    """Read how many tasks this node has from `SLURM_STEP_TASKS_PER_NODE`, such as `2(x3),1`."""
    spread = environ.text("SLURM_STEP_TASKS_PER_NODE")
    if not spread:
        return None
    node = environ.integer("SLURM_NODEID", 0) or 0
    for part in spread.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part, re.ASCII)
        if match is None:
            return None
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    return None


def expand_hosts(text: str) -> list[str]:
    """Write out a list of hosts in SLURM's short form.

    >>> expand_hosts("gpu[09-10],login1")
    ['gpu09', 'gpu10', 'login1']
    """
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        head, bracket, rest = part.partition("[")
        inner, _, tail = rest.partition("]")
        for span in inner.split(",") if bracket else ():
            low, _, high = span.partition("-")
            for number in range(int(low), int(high or low) + 1):
                hosts += [f"{head}{number:0{len(low)}d}{each}" for each in expand_hosts(tail) or [""]]
        if not bracket:
            hosts.append(part)
    return hosts


def slurm_port(job: int, step: int) -> int:
    """Return the port at which the ranks of a step of a SLURM job meet, which all of them derive alike."""
    return _FIRST_PORT + (job + _BETWEEN_STEPS * step) % _PORTS  # steps of one job may run together on a node


def publish(place: ProcessEnv) -> None:
    """Write the variables that torch's `env://` rendezvous reads, where a launcher other than torchrun left them out.

    Raises:
        StateError: Several machines take part and nothing says where they meet.
    """
    if place.size == 1:
        return
    for name, value in (
        ("RANK", place.rank),
        ("WORLD_SIZE", place.size),
        ("LOCAL_RANK", place.local_rank),
        ("LOCAL_WORLD_SIZE", place.local_size if place.counted else None),
    ):
        if value is not None and environ.text(name) is None:
            environ.write(name, value)
    if environ.text("MASTER_ADDR") is None:
        environ.write("MASTER_ADDR", _meeting_host(place))
    if environ.text("MASTER_PORT") is None:
        environ.write("MASTER_PORT", _meeting_port(place))


def _meeting_host(place: ProcessEnv) -> str:
    nodes = environ.text("SLURM_STEP_NODELIST")
    if place.source == "slurm" and nodes:
        return next(iter(expand_hosts(nodes)), nodes)
    if place.size == place.local_size:
        return "127.0.0.1"
    raise StateError(
        f"{place.size} processes on several machines have no meeting point; MASTER_ADDR is not set (ranks come from "
        f"{place.source}). Set MASTER_ADDR to the address of the machine of rank 0, the same on all."
    )


def _meeting_port(place: ProcessEnv) -> int:
    """Return a port that all ranks derive alike: from the job's number under SLURM, torch's usual one elsewhere."""
    job = environ.integer("SLURM_JOB_ID")
    step = environ.integer("SLURM_STEP_ID", 0) or 0
    return slurm_port(job, step) if place.source == "slurm" and job is not None else 29500
