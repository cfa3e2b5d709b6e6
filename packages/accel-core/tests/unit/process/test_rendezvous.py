"""Finding one's rank."""

import os

import pytest

from accel_core.errors import ConfigurationError, StateError
from accel_core.host.environ import patch_environment
from accel_core.process.rendezvous import ProcessEnv, expand_hosts, locate, publish

CASES = {
    "torchrun": {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2},
    "openmpi": {
        "OMPI_COMM_WORLD_RANK": 3,
        "OMPI_COMM_WORLD_SIZE": 4,
        "OMPI_COMM_WORLD_LOCAL_RANK": 1,
        "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
    },
    "mvapich2": {
        "MV2_COMM_WORLD_RANK": 3,
        "MV2_COMM_WORLD_SIZE": 4,
        "MV2_COMM_WORLD_LOCAL_RANK": 1,
        "MV2_COMM_WORLD_LOCAL_SIZE": 2,
    },
    "pmi": {"PMI_RANK": 3, "PMI_SIZE": 4, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 2},
    "slurm": {
        "SLURM_STEP_ID": 0,
        "SLURM_PROCID": 3,
        "SLURM_STEP_NUM_TASKS": 4,
        "SLURM_LOCALID": 1,
        "SLURM_NODEID": 1,
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    },
}


@pytest.mark.parametrize("source", CASES)
def test_every_launcher_is_understood(source: str) -> None:
    """The same place is read from the variables of each launcher."""
    with patch_environment(**CASES[source]):
        assert locate() == ProcessEnv(3, 4, 1, 2, source)


def test_slurm_counts_only_inside_a_step() -> None:
    """Plain python under sbatch is one process, whatever the allocation holds."""
    with patch_environment(SLURM_PROCID=0, SLURM_NTASKS=8, SLURM_JOB_ID=5):
        assert locate() == ProcessEnv(0, 1, 0, 1, "alone")


@pytest.mark.parametrize(("rank", "size"), [(4, 4), (-1, 2), (0, 0)])
def test_contradiction_is_refused(rank: int, size: int) -> None:
    """A rank outside its world names both, and the variable."""
    with patch_environment(RANK=rank, WORLD_SIZE=size), pytest.raises(ConfigurationError, match="WORLD_SIZE"):
        locate()


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b1", ["a", "b1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12].x,login", ["n08.x", "n09.x", "n10.x", "n12.x", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a-1,a-2", ["a-1", "a-2"]),
        ("", []),
    ],
)
def test_host_lists_are_written_out(text: str, hosts: list[str]) -> None:
    """SLURM's short form of hosts is written out in order."""
    assert expand_hosts(text) == hosts


def test_meeting_point_is_derived_alike_under_slurm() -> None:
    """Every rank of a step derives the same address and port."""
    variables = {**CASES["slurm"], "SLURM_STEP_NODELIST": "gpu[7-8]", "SLURM_JOB_ID": 41}
    with patch_environment(RANK="", WORLD_SIZE="", LOCAL_RANK="", LOCAL_WORLD_SIZE="", MASTER_ADDR="", MASTER_PORT=""):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        with patch_environment(**variables):
            publish(locate())
            assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("gpu7", "20041")
            assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("3", "4")


def test_several_machines_without_a_meeting_point_are_refused() -> None:
    """Ranks that could only hang are told to set MASTER_ADDR."""
    torchrun = {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    with patch_environment(**CASES["openmpi"], **torchrun), pytest.raises(StateError, match="MASTER_ADDR"):
        publish(ProcessEnv(3, 4, 1, 2, "openmpi"))
