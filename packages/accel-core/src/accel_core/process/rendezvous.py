"""How a process learns its rank, and where the ranks meet.

Ranks come from torchrun, MPI (Open MPI, PMI, MVAPICH2) or SLURM. SLURM's count only inside an srun step: plain
`python` under sbatch is one process, whatever the allocation holds.
"""

from __future__ import annotations

import re

from accel_core._records import record
from accel_core.errors import ConfigurationError, StateError
from accel_core.host import environ

__all__ = ["ProcessEnv", "first_slurm_host", "locate", "publish"]


@record(frozen=True)
class ProcessEnv:
    """Where a process stands among its fellows.

    Attributes:
        rank: Number of the process, from 0 to `size` - 1.
        size: Number of processes.
        local_rank: Number of the process on its machine.
        local_size: Number of processes on its machine.
        source: Who said so: `torchrun`, `openmpi`, `pmi`, `mvapich2`, `slurm` or `alone`.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    source: str


_SOURCES: tuple[tuple[str, str, str, str, str], ...] = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    (
        "mvapich2",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    ("pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""(source, rank, world size, local rank, local world size), in the order in which they are believed."""


def locate() -> ProcessEnv:
    """Read this process's place from the environment.

    Raises:
        ConfigurationError: The variables contradict each other.
    """
    for source, rank_name, size_name, local_rank_name, local_size_name in _SOURCES:
        rank, size = environ.integer(rank_name), environ.integer(size_name)
        if rank is not None and size is not None:
            return _checked(
                source, rank, size, environ.integer(local_rank_name), environ.integer(local_size_name), size_name
            )
    if environ.integer("SLURM_STEP_ID") is not None and environ.integer("SLURM_PROCID") is not None:
        size = environ.integer("SLURM_STEP_NUM_TASKS") or environ.integer("SLURM_NTASKS") or 1
        return _checked(
            "slurm",
            environ.integer("SLURM_PROCID") or 0,
            size,
            environ.integer("SLURM_LOCALID"),
            _slurm_local_size(),
            "SLURM_STEP_NUM_TASKS",
        )
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
    return ProcessEnv(rank, size, local, local_size if local_size and local_size > 0 else size, source)


def _slurm_local_size() -> int | None:
    """Read how many tasks this node has from `SLURM_STEP_TASKS_PER_NODE`, such as `2(x3),1`."""
    spread = environ.text("SLURM_STEP_TASKS_PER_NODE")
    if not spread:
        return None
    counts: list[int] = []
    for part in spread.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = environ.integer("SLURM_NODEID", 0) or 0
    return counts[node] if node < len(counts) else None


def first_slurm_host(nodes: str) -> str:
    """Return the first host of a SLURM node list.

    Args:
        nodes: For example `gpu[003-006,9],login1`.

    >>> first_slurm_host("gpu[003-006,9],login1")
    'gpu003'
    """
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise ConfigurationError(f"A SLURM node list cannot be read; got {nodes!r}. Set MASTER_ADDR by hand.")
    return match[1] + (match[2] or "") + (match[3] or "")


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
        ("LOCAL_WORLD_SIZE", place.local_size),
    ):
        if environ.text(name) is None:
            environ.write(name, value)
    if environ.text("MASTER_ADDR") is None:
        environ.write("MASTER_ADDR", _meeting_host(place))
    if environ.text("MASTER_PORT") is None:
        environ.write("MASTER_PORT", _meeting_port(place))


def _meeting_host(place: ProcessEnv) -> str:
    nodes = environ.text("SLURM_STEP_NODELIST")
    if place.source == "slurm" and nodes:
        return first_slurm_host(nodes)
    if place.size == place.local_size:
        return "127.0.0.1"
    raise StateError(
        f"{place.size} processes on several machines have no meeting point; MASTER_ADDR is not set (ranks come from "
        f"{place.source}). Set MASTER_ADDR to the address of the machine of rank 0, the same on all."
    )


def _meeting_port(place: ProcessEnv) -> int:
    """Return a port that all ranks derive alike: from the job's number under SLURM, torch's usual one elsewhere."""
    job = environ.integer("SLURM_JOB_ID")
    return 20000 + job % 20000 if place.source == "slurm" and job is not None else 29500
